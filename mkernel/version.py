"""The version of mkernel, for code that must not import the whole package."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
