"""Proof, on a running engine of any version from 0.6 on, that paged KV and prefix caching work."""


class ProofError(Exception):
    """Nothing can be proven with what was given (no engine, not a vLLM, not its log); the message is one line."""
