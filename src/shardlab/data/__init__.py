"""Corpora, tokens, and the rows of a step.

`prepare.py` turns a dataset's config into a folder of memory-mapped tokens, once; `dataset.py` opens that folder
and answers with the rows of any step; `rows.py` feeds them in order. To add a dataset: one module in `corpora/`
(its `__init__.py` says what must stand in it), one YAML in `conf/dataset/`, one line in `config/schema.py`'s CHOSEN.
"""
