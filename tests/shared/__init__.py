"""Test bodies that fit every op, also one from outside the package (``tests/small_op`` runs all of them)."""
