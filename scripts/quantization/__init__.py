"""A Hugging Face model into a 4-bit checkpoint, judged before anybody is served by it.

job: config -> preflight -> calibration -> producer -> artifact (MODELS_DIR/<name>/<digest>/, with its manifest).
"""


class QuantizeError(Exception):
    """A mistake of the caller or a machine that is too small; the message is the whole explanation, in one line."""
