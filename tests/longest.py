"""Files of tests that take longest: they are begun before all others, so that the workers end together."""

from __future__ import annotations

LONGEST = (
    "tests/pipeline/test_distributed.py",
    "tests/convert/test_opinfo.py",
    "tests/fuzz/test_fuzz.py",
    "tests/test_architectures.py",
    "tests/pipeline/test_mesh.py",
    "tests/pipeline/test_split.py",
    "tests/convert/test_edges.py",
    "tests/cli/test_pipeline_train.py",
    "tests/network/test_infer_against_onnx.py",
    "tests/generation/test_readers.py",
    "tests/test_promises.py",
    "tests/convert/test_fourier.py",
    "tests/lower/test_masks.py",
    "tests/load/test_memory.py",
    "tests/pipeline/test_compiled_stages.py",
    "tests/archive/test_new_process.py",
    "tests/generation/test_generate.py",
    "tests/archive/test_refit.py",
    "tests/load/test_processes.py",
    "tests/generation/test_docs.py",
    "tests/partition/test_random_models.py",
)
