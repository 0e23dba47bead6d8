"""Triton reads TRITON_INTERPRET when a kernel is decorated, so these tests run in a process of their own: test_in_interpreter.py starts it."""

import os

INSIDE = os.environ.get("FXMASK_INTERPRETER") == "1"
collect_ignore_glob = ["test_in_interpreter.py"] if INSIDE else ["test_[!i]*.py"]
