"""A command with -m: its jobs, the slots they run in, its books, and what it shows.

app.py is the command; jobs.py one job and all of them; slots.py who may use which cores and GPUs; books.py and rows.py
what is written down, so that the same command goes on where it was cut off; live.py the table on a terminal; trials.py
what a sweeper can tell a job while it runs.
"""
