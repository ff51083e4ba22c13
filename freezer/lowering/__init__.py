"""Lowerings, one module per backend: each has `build(captured, path, target, settings)` and `open_payload(path, settings, device)`.

`build` writes one payload file, and returns what it did: a `Lowered`. `open_payload` opens one, made with the same settings, on a
device (the CPU by default), and returns a runner; it needs no compiler. A runner of a `flat` payload takes the tensor inputs in
order and gives the output tensors in order; a runner of a `native` payload is called as the source model is. `recipes.LOWERINGS`
says which module serves which kind.
"""
