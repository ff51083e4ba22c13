"""Numpy arrays are judged as tensors are, over perturbations of every kind."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from freezer.compare.array_numerics import array_distances, array_problem, wide
from freezer.compare.gate import GoldenGate, OutputError, gate_problem
from freezer.compare.numerics import distances, doubles, exact_problem
from freezer.compare.slices import Slices

SHAPES = ((), (0,), (7,), (3, 40), (2, 9, 2000))
LIMITS = ((), (100.0,))
ERRORS = (0.0, 1e-8, 3e-7, 1e-6, 1e-5, 1e-3, 0.1)


def reference_of(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    r = random.standard_normal(shape)
    if dtype.startswith("complex"):
        r = r + 1j * random.standard_normal(shape)
    if dtype in ("int32", "bool"):
        return np.asarray(np.abs(r) * 3).astype(dtype)
    return np.asarray(np.where(random.random(shape) < 0.1, r * 1e4, r)).astype(dtype)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "complex64", "complex128", "int32", "bool"]
)
def test_arrays_pass_where_tensors_do(dtype: str) -> None:
    verdicts = set()
    for seed, (shape, limits, error) in enumerate(product(SHAPES, LIMITS, ERRORS)):
        r = reference_of(shape, dtype, seed)
        noise = np.random.default_rng(seed + 1000).standard_normal(shape) * error
        c = np.asarray(r * (1 + noise)).astype(dtype)
        if dtype == "bool" and error > 1e-4:
            c = np.asarray(~r)
        if seed % 5 == 0 and r.ndim and r.dtype.kind == "f" and r.size:
            r.flat[0] = c.flat[0] = math.inf
        one, other = torch.from_numpy(r), torch.from_numpy(c)
        exact = exact_problem(one, other, limits)
        assert (array_problem(r, c, limits) is None) == (exact is None), (shape, limits, error)
        verdicts.add(exact is None)
        if exact is not None or dtype in ("int32", "bool"):
            continue
        of_tensors, of_arrays = distances(one, other, limits=limits), array_distances(r, c, limits)
        for expected, found in zip(of_tensors, of_arrays, strict=True):
            assert found.num_elements == expected.num_elements
            for name in ("noise", "signal", "power", "inner", "max_abs_err", "max_rel_err"):
                assert getattr(found, name) == pytest.approx(
                    getattr(expected, name), rel=1e-9, abs=1e-30
                ), name
        for gate_reference, dtype_of in product(("float64", "eager"), (one.dtype, r.dtype)):
            gate = GoldenGate(error_ratio_max=3.0, reference=gate_reference)  # type: ignore[arg-type]
            problems = []
            for own in (of_tensors[0], of_arrays[0]):
                output = OutputError(
                    rmse=own.rmse,
                    native_rmse=1e-7 * own.rms,
                    rms=own.rms,
                    dtype=dtype_of,
                    num_elements=r.size,
                )
                problems.append(gate_problem(output, gate, own) is None)
            assert problems[0] == problems[1]
            verdicts.add(problems[0])
        slices = [Slices(doubles, limits), Slices(wide, limits)]
        slices[0].add(one, other)
        slices[1].add(r, c)
        judged = [
            item.problem(kind, 3.0, 1e-6)
            for item, kind in zip(slices, (one.dtype, r.dtype), strict=True)
        ]
        assert (judged[0] is None) == (judged[1] is None)
    assert verdicts == {True, False}


def test_arrays_differ_in_the_same_words() -> None:
    nan, one = np.array([math.nan, 1.0], np.float32), np.array([1.0, 1.0], np.float32)
    pairs: list[tuple[np.ndarray, np.ndarray]] = [
        (nan, one),
        (one, nan),
        (nan, nan),
        (one, one[:1]),
        (one, one.astype(np.float64)),
    ]
    for r, c in pairs:
        wanted = exact_problem(torch.from_numpy(r), torch.from_numpy(c))
        assert array_problem(r, c) == (wanted.replace("torch.", "") if wanted else None)
