"""The one exception for what a user can mend.

It is raised where the fact is known, printed once by cli.py as one line, and ends the command with status 2.
Every other exception is a bug and keeps its traceback.
"""


class ShardlabError(Exception):
    """Something in the user's config, data or machine is wrong; the message says what, and what would work."""
