from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Tests are imported by path (--import-mode=importlib), so a helper beside them is loaded by path too.
_spec = importlib.util.spec_from_file_location("scripted", Path(__file__).with_name("scripted.py"))
if _spec is not None and _spec.loader is not None and "scripted" not in sys.modules:
    sys.modules["scripted"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["scripted"])
