"""What a job came to, as its row: from the record of its run, or from what ended it without one."""

import math
import traceback
from collections.abc import Sequence
from dataclasses import replace

from shardlab.errors import ShardlabError
from shardlab.launch.ranks import RanksFailed
from shardlab.launch.run import RunFailed
from shardlab.sweeps.rows import Row
from shardlab.tracking.record import RunRecord


def of_record(row: Row, record: RunRecord, objectives: Sequence[str]) -> Row:
    """The row of a job whose run has ended: a run that finished without a number to show has failed as a job."""
    if record.status != "FINISHED":
        status = "failed" if record.status == "FAILED" else "killed"
        return replace(row, status=status, reason=record.reason or "")
    values = {name: record.value(name) for name in objectives}
    known = [value for value in values.values() if value is not None]
    odd = [name for name, value in values.items() if value is None or not math.isfinite(value)]
    if odd:
        said = [f"{name} is {'missing' if values[name] is None else values[name]}" for name in odd]
        return replace(row, status="failed", reason=", ".join(said))
    if record.pruned is not None:
        return replace(row, status="pruned", objective=known, reason=f"at step {record.pruned}")
    return replace(row, status="finished", objective=known)


def of_error(row: Row, error: BaseException) -> tuple[Row, str]:
    """The row of a job that an exception ended, and the text that explains it: a traceback, or the end of a log.

    What the user can mend before there is a run makes the job refused, everything else failed. An exception that
    is neither a run's nor the user's is a bug: its traceback is wanted, but the other jobs are not to blame.
    """
    status, reason, text = "failed", str(error), ""
    of_a_rank = error.__cause__ if isinstance(error.__cause__, RanksFailed) else None
    if isinstance(error, ShardlabError):
        status = "refused" if of_a_rank is None else "failed"
    elif isinstance(error, RunFailed):
        reason, text = error.reason, "" if of_a_rank is None else of_a_rank.text
    else:
        reason = f"{type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(error))
    return replace(row, status=status, reason=" ".join(reason.split())), text.rstrip()
