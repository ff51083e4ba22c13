// Golden inputs and outputs: reading them, and holding what this machine computes against them by the gate's own
// formula.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "artifact.h"

namespace coldpress {

using Tensors = std::unordered_map<std::string, at::Tensor>;

// The tensors of a .safetensors file, by name. Its digest must have been verified. Throws Refused where it is no such
// file.
Tensors read_tensors(const std::filesystem::path& path);

// One output of one golden set, on this machine.
struct Figure {
  std::size_t set_index;
  std::string output;
  std::optional<double> error_ratio;  // none for integers, and where shapes, dtypes or infinite places differ
  double max_abs_err;
  std::string problem;  // empty where the output passes
};

// How far `got` is from the golden outputs, `expected`: for each golden set that was run, the outputs in the manifest's
// order.
std::vector<Figure> compare(const Manifest& manifest, const std::vector<std::vector<at::Tensor>>& expected,
                            const std::vector<std::vector<at::Tensor>>& got);

}  // namespace coldpress
