"""The command line: ``python -m mkernel``. The only part of mkernel that prints."""
