"""Standard streams that are closed, full or gone cost what they would have shown; the run ends as it would."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch_processes import HERE, LIGHT, SOURCE

from shardlab.tracking.record import RunRecord

CODE = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(SOURCE)!r}]
{LIGHT}
from launch_parts import stand_in
from shardlab.cli import main
from shardlab.launch import run
stand_in(run)
sys.exit(main(["train", "tracking=none", "strategy=ddp", "run_dir=run", *sys.argv[1:]]))
"""

STREAMS = ["2>&-", ">&-", "<&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"]


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize(("fault", "status", "code"), [("none", "FINISHED", 0), ("kill", "FAILED", 1)])
def test_a_run_ends_true_whatever_its_streams_are(streams: str, fault: str, status: str, code: int) -> None:
    Path("code.py").write_text(CODE)
    path = f"PYTHONPATH={HERE}:{SOURCE}:$PYTHONPATH"
    command = f"{path} exec {sys.executable} code.py model.name={fault} {streams}"
    left = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    record = RunRecord.load(Path("run"))
    assert (record.status, left.returncode) == (status, code), left.stdout + left.stderr
    assert fault != "kill" or "SIGKILL" in str(record.reason)
    assert len(record.steps) == 4
    assert "Traceback" not in left.stdout + left.stderr
