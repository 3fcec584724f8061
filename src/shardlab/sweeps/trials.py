"""What a sweeper that prunes tells the jobs: by job number, whom to ask after each evaluation."""

from shardlab.launch.job import Answer

prunes: dict[int, Answer] = {}
"""Job number -> whether that job is to end now. A sweeper puts it in before it launches the job, and takes it out."""
