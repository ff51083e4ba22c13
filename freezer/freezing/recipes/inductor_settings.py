"""Every setting of Inductor that changes a payload's numbers, speed or requirements. Imports no torch.

Inductor reads most defaults from the environment (TORCHINDUCTOR_..., AOT_INDUCTOR_...), and any code may set them. So
a build passes all of them, as a part of its recipe's settings and thus of its key: a user's shell or code changes no payload. The
values are torch 2.13's defaults unless a comment gives the reason. A setting that the installed torch lacks is omitted
(freezing/lowering/inductor/inductor.py); torch's version is part of the key too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    # Freezing. Discarding parameters is for torch.compile, and raises here.
    "freezing": True,
    "freezing_discard_parameters": False,
    # Convolutions run on channels-last activations and weights: several times faster on CPUs. Outputs keep eager's strides.
    "layout_optimization": True,
    "force_layout_optimization": False,
    "keep_output_stride": True,
    # Folding of mul, add, sub and div into linear layers fails on scalars in torch (inductor/torch_patches.py).
    "enable_linear_binary_folding": False,
    # Numerics: as exact as eager, without additional rounding.
    "use_fast_math": False,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.use_decompose_tanh": False,
    "emulate_precision_casts": False,
    "eager_numerics.division_rounding": False,
    "eager_numerics.disable_ftz": False,
    "fallback_random": False,
    "deterministic": False,
    "batch_invariant": False,
    "online_softmax": True,
    "split_reductions": True,
    "min_num_split": 0,
    "cpp.use_two_step_variance_threshold": 1024,
    # Passes.
    "pattern_matcher": True,
    "joint_graph_constant_folding": True,
    "use_dce": True,
    "use_pre_grad_passes": True,
    "use_joint_graph_passes": True,
    "use_post_grad_passes": True,
    "split_cat_fx_passes": True,
    "batch_fusion": True,
    "group_fusion": False,
    "efficient_conv_bn_eval_fx_passes": False,
    "decompose_mem_bound_mm": False,
    "fallback_by_default": False,
    "selective_decompose": False,
    "optimize_scatter_upon_const_tensor": True,
    "disabled_passes": "",
    "add_pre_grad_passes": None,
    "remove_pre_grad_passes": None,
    "pre_grad_fusion_options": {},
    "post_grad_fusion_options": {},
    "b2b_gemm_pass": False,
    # Fusion and loops.
    "epilogue_fusion": True,
    "prologue_fusion": True,
    "aggressive_fusion": False,
    "permute_fusion": False,
    "combo_kernels": False,
    "benchmark_fusion": False,
    "benchmark_epilogue_fusion": True,
    "loop_ordering_after_fusion": True,
    "loop_reindexing_after_fusion": True,
    "max_fusion_size": 64,
    "delay_realize_cheap_outputs": True,
    "cpp.max_horizontal_fusion_size": 16,
    "cpp.enable_concat_linear": False,  # torch: "not always have benefit"
    "cpp.enable_grouped_gemm_template": False,
    "cpp.fallback_scatter_reduce_sum": True,
    # Memory of a call.
    "inplace_buffers": True,
    "inplace_padding": True,
    "allow_buffer_reuse": True,
    "memory_planning": False,
    "memory_pool": "intermediates",
    "reorder_for_peak_memory": True,
    "shape_padding": True,
    "comprehensive_padding": True,
    "disable_padding_cpu": True,
    # Kernels. All CPUs of the device class have its vector instructions: torch need not test them, which takes seconds.
    # Threads are fixed: packed weights are laid out for one count.
    "cpp.vec_isa_ok": True,
    "cpp.dynamic_threads": False,
    "cpp.no_redundant_loops": True,
    "cpp.min_chunk_size": 512,
    "cpp.enable_tiling_heuristics": True,
    "cpp.enable_loop_tail_vec": True,
    "cpp.gemm_max_k_slices": 1,
    "cpp.gemm_cache_blocking": None,
    "cpp.gemm_thread_factors": None,
    "cpp.use_small_dequant_buffer": False,
    "cpp.force_inline_kernel": False,
    "cpp.use_constexpr_for_int_array": True,
    "cpp.inject_relu_bug_TESTING_ONLY": None,
    "cpp.inject_log1p_bug_TESTING_ONLY": None,
    # Checks in the code; no instruments for debugging Inductor.
    "size_asserts": True,
    "scalar_asserts": True,
    "alignment_asserts": True,
    "nan_asserts": False,
    "save_args": False,
    "cpp.enable_kernel_profile": False,
    "generate_intermediate_hooks": False,
    "profiler_mark_wrapper_call": False,
    # Tuning; `inductor-max-autotune` enables it. Without it nothing is timed, so two builds of one key agree.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm_backends": "ATEN,CPP",
    "max_autotune_conv_backends": "ATEN",
    "max_autotune_gemm_search_space": "DEFAULT",
    "max_autotune_allow_flexible_layouts": False,
    "coordinate_descent_tuning": False,
    "search_autotune_cache": False,
    "incremental_autotune": False,
    # In this process, which has the class's limits and thread count, unlike a subprocess of torch.
    "autotune_in_subproc": False,
    "inductor_default_autotune_warmup": 25,
    "inductor_default_autotune_rep": 100,
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
    # The shared library.
    "fx_wrapper": False,
    "graph_partition": True,
    "compile_threads": 1,
    "aot_inductor.compile_wrapper_opt_level": "O1",
    "aot_inductor.enable_lto": False,
    "aot_inductor.debug_compile": False,
    "aot_inductor.debug_symbols": False,
    "aot_inductor.debug_intermediate_value_printer": "0",
    "aot_inductor.enable_frame_pointer": False,  # True in torch, for profilers; costs a register
    "aot_inductor.enable_line_tables": False,  # True in torch, for profilers; costs bytes
    "aot_inductor.dump_aoti_minifier": False,
    "aot_inductor.use_runtime_constant_folding": False,  # folding is done here, not on the serving machine
    "aot_inductor.use_minimal_arrayref_interface": False,
    "aot_inductor.allow_stack_allocation": False,
    "aot_inductor.package_constants_in_so": True,
    "aot_inductor.package_constants_on_disk_format": None,  # "binary_blob" above `weights_beside_above_mb`
    "aot_inductor.force_mmap_weights": False,
    "aot_inductor.use_consts_asm_build": True,
    "aot_inductor.link_libtorch": True,
    "aot_inductor.cross_target_platform": None,
    "aot_inductor.model_name_for_generated_files": None,
    "aot_inductor.metadata": {},
    "aot_inductor.presets": {},
    # No custom passes; the build observes through three of these (freezing/lowering/inductor/observer.py).
    "pre_grad_custom_pass": None,
    "joint_custom_pre_pass": None,
    "joint_custom_post_pass": None,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    "custom_partitioner_fn": None,
    "_pre_fusion_custom_pass": None,
    "_post_fusion_custom_pass": None,
}

CUDA: Mapping[str, Any] = {
    # No weights are packed for a CPU, which only launches kernels.
    "cpp.weight_prepack": False,
    # Tuned matrix products of Triton besides torch's own; CUTLASS needs a toolkit with nvcc.
    "max_autotune_gemm_backends": "ATEN,TRITON",
    # Kernels for one kind of GPU, compiled ahead: opening the package compiles nothing.
    "aot_inductor.emit_multi_arch_kernel": False,
    "aot_inductor.weight_use_caching_allocator": False,
    # CUDA graphs are decided at load.
    "triton.cudagraphs": False,
    "triton.native_matmul": False,
}
"""Settings that differ for a GPU."""

REQUIRED = ("freezing", "layout_optimization", "cpp.weight_prepack", "cpp.march", "cpp.simdlen", "cpp.threads")
"""Settings that every supported torch has; the build refuses a torch without one of them."""

BESIDE: Mapping[str, Any] = {"aot_inductor.package_constants_on_disk_format": "binary_blob"}
"""Puts the weights beside the shared library, in a file of the package that the loader maps."""

BESIDE_ABOVE_MB = 128
"""Weights above this size, in MB of 1e6 bytes, are stored beside the library. Within it they take twice their size in memory at
load, as pages of the library and as torch's copy, but need no further file."""


REPAIRS_VERSION = 2
"""Increase when torch_patches.py changes the code of a model, so that its builds are redone: 2 clips windows of pools."""


def recipe_settings(*, weight_prepack: bool = True, max_autotune: bool = False) -> dict[str, Any]:
    """The settings of an Inductor recipe, all of which are part of its builds' keys.

    Args:
        weight_prepack: pack the weights of convolutions and linear layers for oneDNN and MKL.
        max_autotune: time the implementations of each matrix product and use the fastest.
    """
    return {
        "inductor": {**COMMON, "cpp.weight_prepack": weight_prepack, "max_autotune": max_autotune},
        "weights_beside_above_mb": BESIDE_ABOVE_MB,
        "repairs": REPAIRS_VERSION,
    }
