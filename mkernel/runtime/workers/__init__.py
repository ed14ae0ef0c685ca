"""Ranks of ``mk.launch`` as worker processes that stay for the next call: what a notebook on GPUs runs on.

The caller (``calls.py``) hands a call to its pool (``pool.py``), whose thread starts the processes, relays what they say and ends them;
each process runs ``serve.py``. They talk over socket pairs in frames (``messages.py``), and see no network.
"""
