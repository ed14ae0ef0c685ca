"""What proves that a plan cannot deadlock and that calls do not meet in memory. Only tests run it.

A module per op: ``wait_graph(plan)`` and ``call_of(plan)``. It states what the kernels do a second time, so that a test can find a cycle or
an unordered access in a schedule before any kernel runs.
"""
