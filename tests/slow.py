"""Tests that take seconds each: jobs of several processes, training, random models, whole families.

`make test` leaves them out and `make test-slow` runs them; continuous integration runs both. An entry is a
file, a test or one case of a test, so that what is slow stands in one place and can be measured anew
(`pytest --durations 100`).
"""

from __future__ import annotations

SLOW = (
    "tests/archive/test_new_process.py",
    "tests/archive/test_refit.py::test_a_new_process_refits_without_the_model",
    "tests/backend/test_zoo.py",
    "tests/build/test_parts.py::test_transformer_with_padding_is_compiled_in_parts",
    "tests/capture/test_fast_path.py",
    "tests/capture/test_output_objects.py::test_caches_that_transformers_registers_keep_their_counts",
    "tests/choose/test_choose.py::test_what_changes_is_measured_anew",
    "tests/cli/test_bench.py::test_one_model_for_real",
    "tests/cli/test_pipeline_train.py",
    "tests/fuzz/test_fuzz.py::test_random_models_answer_as_eager",
    "tests/generation/test_archive.py",
    "tests/generation/test_docs.py",
    "tests/generation/test_generate.py::test_the_memory_of_all_layers_in_one_tensor",
    "tests/generation/test_readers.py",
    "tests/load/test_memory.py",
    "tests/load/test_processes.py",
    "tests/models/test_outside.py",
    "tests/partition/test_hash_seed.py",
    "tests/partition/test_random_models.py",
    "tests/pipeline/test_blockpartition.py::test_the_richer_problem_against_brute_force",
    "tests/pipeline/test_cluster.py::test_a_thousand_layers_on_a_thousand_devices_take_seconds",
    "tests/pipeline/test_compiled_stages.py::test_the_length_of_a_sequence_and_the_last_micro_batch_may_vary",
    "tests/pipeline/test_distributed.py",
    "tests/pipeline/test_mesh.py",
    "tests/pipeline/test_tree.py::test_the_first_block_of_the_document_runs_as_typed",
    "tests/serve/test_process.py",
    "tests/test_promises.py::test_a_kernel_that_packs_its_weights_makes_one_packed_copy",
    "tests/test_promises.py::test_a_machine_with_no_engine_still_compiles_and_notes_say_what_to_install",
    "tests/tuning/test_programs.py",
)


def is_slow(nodeid: str) -> bool:
    """Whether a test is in the list, by itself, by its file or by the test it is a case of."""
    return any(nodeid == entry or nodeid.startswith((f"{entry}::", f"{entry}[")) for entry in SLOW)
