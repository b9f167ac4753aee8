"""What all unit tests have in common."""

import hypothesis

# An example's time is the machine's, which others use as well; what a claim may cost is measured elsewhere.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
