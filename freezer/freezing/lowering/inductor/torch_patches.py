"""Patches of Inductor for the time of a build.

Each fixes a behavior of torch 2.13 that would build something else than the recipe asks for; its
test fails without the patch.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, Node

from freezer.hardware import DeviceClass

_MKLDNN_PASSES = (
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.quantization",
)
"""Modules whose patterns pack weights."""

_VECTORS = (
    ("amx_tile", "VecAMX"),
    ("avx512_vnni", "VecAVX512VNNI"),
    ("avx512f", "VecAVX512"),
    ("avx2", "VecAVX2"),
    ("sve", "VecSVE"),
    ("asimd", "VecNEON"),
)
"""CPU features, the best first, and Inductor's names of their vectors."""

_WIDE = 512

_FOLDED = (
    torch.ops.aten.add.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
)
"""Operators that Inductor folds into a convolution."""


@contextmanager
def vectors_of(device_class: DeviceClass) -> Iterator[None]:
    """Let Inductor use the vector instructions of the class, not those of this CPU.

    `cpp.march` is not enough: torch before 2.12 does not know it and adds -march=native, and for
    512-bit vectors Inductor adds -mavx512vnni, -mavx512bf16 and -mamx-* if this CPU has them.
    """
    if device_class.kind != "cpu":
        yield
        return
    from torch._inductor import cpu_vec_isa

    isa = _vectors(device_class)  # a single object, because torch compiles a probe for each new one
    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[isa]):
        yield


def _vectors(device_class: DeviceClass) -> Any:
    """Inductor's description of the vector instructions of a CPU class, with the compiler flags of
    the class.
    """
    from torch._inductor import cpu_vec_isa

    name = next(name for feature, name in _VECTORS if feature in device_class.features)
    base: Any = getattr(cpu_vec_isa, name)
    if name == "VecSVE":
        return base(device_class.sve_bits)
    own = cpu_vec_isa.VecAVX512 if device_class.simdlen == _WIDE else base

    class OfTheClass(base):  # type: ignore[misc]
        """Vectors as the class defines them, without the extensions of this CPU."""

        __hash__ = cpu_vec_isa.VecISA.__hash__

        def build_arch_flags(self) -> str:
            # of two -march the compiler takes the last
            return " ".join((f"-march={device_class.march}", own._arch_flags, *device_class.flags))

        def is_avx512_bf16_supported(self) -> bool:
            return "avx512_bf16" in device_class.features

        def is_amx_fp16_supported(self) -> bool:
            return "amx_fp16" in device_class.features

    return OfTheClass()


@contextmanager
def own_cache(folder: Path) -> Iterator[Path]:
    """Use a temporary Inductor cache for one build.

    Inductor's cache keeps builds with their weights forever, and looks up timings by shape only,
    also those of other thread counts and instruction sets.

    Args:
        folder: where to make the cache, on a disk with room for the weights twice.
    """
    from torch._inductor.utils import clear_caches

    with (
        tempfile.TemporaryDirectory(
            prefix=".inductor-",
            dir=folder,
            ignore_cleanup_errors=True,
        ) as cache,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache),
    ):
        clear_caches()
        try:
            yield Path(cache)
        finally:
            clear_caches()


@contextmanager
def weight_packing(wanted: bool) -> Iterator[None]:
    """Pack weights or not, for each build; Inductor decides once per process, by
    `cpp.weight_prepack` at its first freeze.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import freezing_patterns as patterns

    patterns.lazy_init.cache_clear()
    with config.patch({"cpp.weight_prepack": True}):
        patterns.lazy_init()
    if wanted:
        passes = [SimpleNamespace(apply=multiply_single_positions), *patterns.pass_patterns]
    else:
        passes = [_without_packing(each) for each in patterns.pass_patterns]
    with mock.patch.object(patterns, "pass_patterns", passes):
        yield


@contextmanager
def linears_of_vectors() -> Iterator[None]:
    """Support linear layers on a single vector: Inductor multiplies the sizes before the last, and
    fails without any.
    """
    from torch._inductor.fx_passes import mkldnn_fusion

    def product(multiply: Callable[[int, int], int], sizes: list[int]) -> int:
        return functools.reduce(multiply, sizes or [-1])  # equals no size

    with mock.patch.object(mkldnn_fusion, "reduce", product):
        yield


@contextmanager
def linked_to_the_cpu_library() -> Iterator[None]:
    """Link a payload for CPUs to libtorch_cpu.so, not to libtorch.so.

    In torch's CUDA builds libtorch.so loads CUDA's libraries, and the linker keeps it for its
    copies of functions of libstdc++. The native runtime loads libtorch_cpu.so alone.
    """
    from torch._inductor import cpp_builder

    original = cpp_builder._get_torch_related_args

    def without_libtorch(*args: Any, **kwargs: Any) -> tuple[list[str], list[str], list[str]]:
        include_dirs, library_dirs, libraries = original(*args, **kwargs)
        return include_dirs, library_dirs, [name for name in libraries if name != "torch"]

    with mock.patch.object(cpp_builder, "_get_torch_related_args", without_libtorch):
        yield


def _without_packing(patterns: Any) -> Any:
    """A copy of a PatternMatcherPass without the patterns that pack weights."""
    from torch._inductor.pattern_matcher import PatternMatcherPass

    def packs(entry: object) -> bool:
        handler = getattr(entry, "handler", None)
        return getattr(handler, "__module__", None) in _MKLDNN_PASSES

    copied = PatternMatcherPass()
    for key, entries in patterns.patterns.items():
        copied.patterns[key] += [entry for entry in entries if not packs(entry)]
    return copied


def name_scalars(graph: Graph) -> None:
    """Give each number that will be folded into a convolution its own buffer.

    Inductor's folding puts all of them into one buffer, `other_tensor`: with `conv1(x) * 2` and
    `conv2(x) * 3` in one model, both are multiplied by 3.

    Args:
        graph: graph of a GraphModule with aten operators and weights as attributes.
    """
    module: Any = graph.owning_module
    for conv in graph.find_nodes(
        op="call_function",
        target=torch.ops.aten.convolution.default,
    ):
        node = _folded_next(conv)
        while node is not None:
            factor = node.args[1]
            if isinstance(factor, float):
                name = f"coldpress_scalar_{node.name}"
                value = node.meta["val"]
                with torch.utils._python_dispatch._disable_current_modes():
                    module.register_buffer(name, torch.tensor([factor], dtype=value.dtype))
                with graph.inserting_before(node):
                    scalar = graph.get_attr(name)
                scalar.meta["val"] = value.new_empty((1,))
                node.update_arg(1, scalar)
            node = _folded_next(node)


def clip_windows(graph: Graph) -> None:
    """Clip windows of average pools to the padded input.

    In ceil mode a window may be larger (EfficientNet of transformers: 2,560 by 2,560 over 7 by 7).
    ATen's kernels stop at the border, but Inductor's loops visit the whole window. The divisor only
    counts the padded input, so the result is the same.

    Args:
        graph: graph with aten operators.
    """
    for node in graph.find_nodes(
        op="call_function",
        target=torch.ops.aten.avg_pool2d.default,
    ):
        image, kernel, *more = node.args
        sizes = image.meta["val"].shape[-2:]
        if not all(isinstance(size, int) for size in sizes):
            continue
        kernel = _both(kernel)
        stride = _both(more[0]) if more and more[0] else kernel
        padding = _both(more[1]) if len(more) > 1 else [0, 0]
        windows = zip(
            kernel,
            sizes,
            padding,
            strict=True,
        )
        clipped = [min(window, size + 2 * pad) for window, size, pad in windows]
        if clipped != kernel:
            node.args = (image, clipped, stride, *more[1:])


def multiply_single_positions(graph: Graph) -> None:
    """Turn 1x1 convolutions of one image over a single position, as in squeeze and excitation, into
    products with a vector.

    Inductor fuses such a product with its neighbors, where a packed convolution is a call of oneDNN
    that prepares itself each time.

    Args:
        graph: graph of a GraphModule with aten operators, after batch norms were folded into
            convolutions.
    """
    aten = torch.ops.aten

    def call(operator: Any, *args: Any) -> Node:
        node = graph.call_function(operator, args)
        values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
        node.meta["val"] = operator(*values)
        return node

    for conv in graph.find_nodes(op="call_function", target=aten.convolution.default):
        image, weight, bias, _, padding, _, transposed, _, groups = conv.args
        value = image.meta["val"]
        num_out, num_in, *kernel = weight.meta["val"].shape
        if transposed or groups != 1 or any(padding) or value.dtype != torch.float32:
            continue
        if list(value.shape) != [1, num_in, *[1] * len(kernel)]:
            continue
        with graph.inserting_before(conv):
            vector = call(aten.reshape.default, image, [1, num_in])
            matrix = call(aten.reshape.default, weight, [num_out, num_in])
            products = call(aten.mul.Tensor, vector, matrix)
            total = call(aten.sum.dim_IntList, products, [-1])
            if bias is not None:
                total = call(aten.add.Tensor, total, bias)
            result = call(aten.reshape.default, total, [1, num_out, *kernel])
        conv.replace_all_uses_with(result)
        graph.erase_node(conv)


def _both(value: int | Iterable[int]) -> list[int]:
    """Height and width of a pool's argument, which may be a single number."""
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def _folded_next(node: Node) -> Node | None:
    """The arithmetic node that folding would take into a node's convolution next."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1 or user.target not in _FOLDED or user.kwargs:
        return None
    left, right = user.args
    if left is not node or not user.meta["val"].is_floating_point():
        return None
    constant = isinstance(right, float) or getattr(right, "op", None) == "get_attr"
    return user if constant else None
