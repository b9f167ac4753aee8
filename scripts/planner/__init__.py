"""How much of a card's memory a model takes, and how many tokens of KV cache are left for it."""


class PlanError(Exception):
    """A mistake of the caller, or a case the planner does not know; the message is the whole explanation."""
