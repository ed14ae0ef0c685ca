"""Shared by the commands of ``mkernel.cli`` and ``mkernel.bench``: the launcher, tables, result files, the checker of results."""
