"""Every defect that was reported has a test that failed before: which, in the order of the report."""

# ruff: noqa: E501  (a table, a line a defect)
from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEFECTS = {
    # Wrong answers
    "1 one tensor given twice as example merges two inputs": "capture/test_example.py::test_one_tensor_given_twice_stays_two_inputs",
    "1 attention compiled with one tensor": "capture/test_example.py::test_self_attention_compiled_with_one_tensor_takes_three",
    "1 an example that is the model's own buffer": "capture/test_example.py::test_an_example_that_is_the_models_own_buffer_is_an_input",
    "2 a decomposition that ignores an argument": "build/test_judge.py::test_a_wrong_decomposition_is_found_named_and_left_out",
    "2 zero rows of the transformer's fast path": "build/test_judge.py::test_the_zero_rows_of_the_transformer_fast_path",
    "2 the whole is compared with the model": "build/test_judge.py::test_a_graph_unlike_its_model_is_never_returned",
    "2 EfficientNetV2-S and its like": "models/test_outside.py::test_every_model",
    "3 a wrong converter beside large values": "test_compare.py::test_a_masked_logit_excuses_no_other",
    "4 weights changed after compiling": "runtime/test_weights.py::test_a_weight_written_to_is_an_error_that_names_it",
    "4 refit takes new ones": "runtime/test_refit.py::test_what_was_folded_is_folded_again",
    "5 folded constants are handed out": "runtime/test_ownership.py::test_constants_handed_out_are_copies",
    "5 .to(dtype, copy=True)": "runtime/test_ownership.py::test_copies_are_copies_and_equal_work_is_not_shared",
    "5 f(a, a) with one changed in place": "runtime/test_ownership.py::test_one_tensor_given_twice_where_one_is_written_is_refused",
    "5 memory is shared as in eager": "runtime/test_values.py::test_memory_is_shared_as_in_the_model",
    "6 conditions on sizes": "capture/test_size_guards.py::test_no_condition_is_dropped",
    "7 int64 with bit 31": "convert/test_integers.py::test_comparisons_see_all_64_bits",
    "7 -2**63 by -1 kills the process": "convert/test_integers.py::test_the_least_integer_by_minus_one",
    "7 NaN into LSTM and GRU, grid_sample": "engines/test_onnxruntime_guards.py::test_special_values_are_answered_as_by_pytorch",
    "7 rows masked out altogether": "convert/test_attention.py::test_rows_masked_out_altogether",
    "7 ties in topk and sort": "convert/test_order.py::test_which_of_equal_elements_is_for_torch_to_say",
    "7 indices that torch refuses": "convert/test_demands.py::test_what_torch_refuses_raises_as_in_torch",
    "8 both ends of a bounded range": "lower/test_range_ends.py::test_what_fails_at_the_end_only_is_found",
    "9 custom ops without a tag": "lower/test_purity.py::test_an_operator_that_is_not_pure_is_neither_merged_nor_folded_nor_dropped",
    "9 Python state frozen by capture": "capture/test_frozen_state.py::test_attributes_that_change_are_told",
    "9 random.random()": "capture/test_frozen_state.py::test_numbers_from_outside_torch_are_told",
    "9 hooks": "capture/test_frozen_state.py::test_hooks_are_told",
    # Failures where PyTorch works
    "10 a cache that cannot be used": "cache/test_never_fatal.py::test_compile_and_balance",
    "11 options= of torch.compile": "backend/test_door.py::test_every_option_of_compile_is_passed_on",
    "11 mode=": "backend/test_door.py::test_a_wish_that_means_nothing_is_an_error",
    "11 any other error falls back": "backend/test_door.py::test_an_error_of_any_kind_leaves_the_graph_to_pytorch",
    "12 compiling in several threads": "load/test_threads.py::test_compiling_in_many_threads",
    "13 an engine that raises anything": "faults/test_engine_faults.py::test_whatever_is_raised_while_compiling_costs_the_piece",
    "13 at import": "faults/test_engine_faults.py::test_an_engine_of_another_package_that_cannot_be_imported",
    "13 at a later call": "faults/test_engine_faults.py::test_a_failure_at_a_call_is_answered_by_pytorch_once_told_and_for_good",
    "14 enabling what torch composes itself": "lower/test_decompositions.py::test_enabling_what_torch_composes_itself_ends",
    "14 enable_grad, vmap, a sparse buffer": "capture/test_export.py::test_what_export_takes_compiles",
    "14 eval() raises": "capture/test_export.py::test_a_module_without_eval_is_captured_in_evaluation",
    "14 ep.module()": "capture/test_export.py::test_an_exported_module_compiles",
    "14 Dim('batch') on Llama, Qwen3, GPT-2": "capture/test_export.py::test_a_named_dim_varies_as_export_allows",
    "14 suggested fixes": "capture/test_export.py::test_the_error_has_torchs_suggested_fixes",
    "15 models that export cannot take": "build/test_parts.py::test_what_can_be_captured_is_compiled",
    "15 fallback=": "build/test_parts.py::test_eager_and_error",
    "15 TorchScript": "build/test_parts.py::test_torchscript_runs_as_it_is",
    "16 views alone": "partition/test_wishes.py::test_full_compilation_of_views_alone",
    "16 full compilation in bodies": "partition/test_wishes.py::test_full_compilation_holds_in_bodies",
    "17 upsampling to a size of run time": "convert/test_resize_at_run_time.py::test_to_the_size_of_another",
    "17 _pdist_forward": "convert/test_resize_at_run_time.py::test_pairs_of_rows_that_vary",
    "17 index_put with broadcasts": "convert/test_indexing.py::test_index_put",
    "17 _embedding_bag": "convert/test_indexing.py::test_bags_of_open_length",
    "17 resize_, unbind of sizes that vary": "convert/test_sizes_that_change.py::test_what_torch_cannot_do_with_a_size_that_varies_is_told",
    "18 f(x, flag=True)": "capture/test_example.py::test_an_argument_that_repeats_its_default_is_taken",
    "18 .half(), .to('cuda')": "runtime/test_weights.py::test_another_dtype_or_device_is_refused",
    "18 .train()": "runtime/test_weights.py::test_what_changes_nothing_is_fine",
    "18 state_dict()": "runtime/test_weights.py::test_state_dict_has_the_models_keys",
    "18 the global RNG": "capture/test_example.py::test_compiling_moves_no_generator",
    "18 @converter(custom_op_object)": "convert/test_registry.py::test_a_custom_operator_is_named_by_the_object_that_torch_library_makes",
    "18 Input(dtype='float32'), min_block_size='3'": "capture/test_example.py::test_wrong_wishes_are_told_in_a_sentence",
    "18 bad paths on the command line": "cli/test_main.py::test_mistakes_are_one_sentence",
    "18 --ranks 0": "cli/test_pipeline.py::test_a_bad_value_is_one_sentence",
    # Wishes accepted and ignored
    "19 names that match nothing": "partition/test_wishes.py::test_a_name_that_means_nothing_is_an_error",
    "19 rewrite=": "rewrite/test_chosen.py::test_a_wish_that_means_nothing_is_an_error",
    "19 'relu'": "partition/test_wishes.py::test_an_op_by_every_name",
    "19 aten::convolution": "partition/test_wishes.py::test_an_op_answers_to_what_it_lowers_to_and_comes_from",
    "19 paths inside bodies": "partition/test_wishes.py::test_names_in_bodies_are_found",
    "19 paths seen through torch.compile": "partition/test_wishes.py::test_paths_read_as_the_model_writes_them",
    "20 backend_support_map": "partition/test_wishes.py::test_every_strategy_obeys_the_support_map",
    "20 register_decomposition": "lower/test_decompositions.py::test_the_users_decomposition_wins_over_torchs_and_over_converters",
    "20 a converter that raises": "faults/test_engine_faults.py::test_a_users_converter_that_fails_is_told",
    "20 run_on": "partition/test_wishes.py::test_run_on_wins_over_the_work_rule",
    "20 atomic= and memory_budget=": "partition/test_wishes.py::test_atomic_and_memory_budget_by_name",
    "20 options= and names": "partition/test_wishes.py::test_options_and_names_at_once_are_an_error",
    "20 explain of bodies": "partition/test_wishes.py::test_explain_says_what_compile_does_and_descends_into_bodies",
    "20 keys of body_plans": "partition/test_wishes.py::test_plans_of_bodies_inside_bodies_are_all_there",
    "20 check_pattern": "rewrite/test_check_pattern.py::test_rules_that_are_wrong_only_there",
    # What must work besides
    "edge values of every converter": "convert/test_edges.py::test_all_ops_at_their_edges",
    "a fuzzer": "fuzz/test_fuzz.py::test_random_models_answer_as_eager",
    "an engine that hangs": "faults/test_engine_faults.py::test_an_engine_that_hangs_is_left_behind",
    "a cache that is full, read-only or corrupt": "faults/test_cache_faults.py::test_compiling_goes_on",
    "Ctrl-C in every phase": "faults/test_engine_faults.py::test_interrupting_any_phase",
    "32 threads": "load/test_threads.py::test_32_threads_on_one_module",
    "fork and spawn": "load/test_processes.py::test_compiling_in_a_spawned_process",
    "memory over calls": "load/test_memory.py::test_calls_keep_nothing",
    "memory over compiles": "load/test_memory.py::test_compiles_keep_nothing",
    "autocast around a model": "runtime/test_autocast.py::test_a_call_under_autocast_is_refused_and_says_what_to_do",
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_its_test_is_there(defect: str) -> None:
    file, name = DEFECTS[defect].split("::")
    functions = [
        node for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    assert name in {function.name for function in functions}
