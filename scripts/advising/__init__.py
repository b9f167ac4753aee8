"""Where `make advise` reads, what the planner adds, and how it is shown. The rules are gateway/advice.py's."""


class SourceError(Exception):
    """There is nothing to read advice from; the message is one line."""
