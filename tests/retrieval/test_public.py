from __future__ import annotations

import subprocess
import sys

import blendkv.retrieval as retrieval


def test_public_names_exist_and_are_documented():
    for name in retrieval.__all__:
        assert getattr(retrieval, name).__doc__, name


def test_importing_the_room_loads_no_model_library():
    code = (
        "import sys, blendkv.retrieval; "
        "print([m for m in ('sentence_transformers', 'datasets', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_room_imports_no_other_room():
    code = (
        "import sys, blendkv.retrieval; "
        "rooms = ('kernels', 'store', 'engines', 'blend', 'pipeline', 'eval', 'cli'); "
        "print([m for m in sys.modules if m.startswith(tuple('blendkv.' + r for r in rooms))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
