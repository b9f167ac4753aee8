"""Did you mean: the known name nearest to a wrong one."""


def distance(one: str, other: str) -> int:
    """Edits (insert, delete, replace, swap of neighbours) that turn one text into the other."""
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, above = above, row
    return above[-1]


def nearest(name: str, known: list[str]) -> str | None:
    """The known name within two edits, or a fifth of the name's length, or None: a farther one would be a guess."""
    near = min(((distance(name, candidate), candidate) for candidate in known), default=None)
    return near[1] if near and near[0] <= max(2, len(name) // 5) else None
