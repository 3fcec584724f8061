"""The exceptions that speak to people: one for what a user can mend, one for a run that ends itself.

A ShardlabError is raised where the fact is known, printed once by cli.py as one line, and ends the command with status
2. Every other exception but RunEnded is a bug and keeps its traceback.
"""


class ShardlabError(Exception):
    """Something in the user's config, data or machine is wrong; the message says what, and what would work."""


class RunEnded(Exception):  # noqa: N818 - it says what happened
    """Training can't go on, and neither a bug nor the config is to blame: a loss of NaN. Raised alike on all ranks of
    the run, which has failed (status 1); the message is its whole reason."""
