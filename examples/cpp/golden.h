// Golden inputs and outputs: read them, and compare this machine's outputs with them by the formula of the drift gate.
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

// The tensors of a .safetensors file by name; verify its digest first. Throws Refused if it is not such a file.
Tensors read_tensors(const std::filesystem::path& path);

// One output of one golden set, on this machine.
struct Figure {
  std::size_t set_index;
  std::string output;
  std::optional<double> error_ratio;  // none for integers, or if shapes, dtypes, or the places of NaN and Inf differ
  double max_abs_err;
  std::string problem;  // empty if the output passes
};

// Compare the outputs of each golden set, in the manifest's order, with the golden outputs.
std::vector<Figure> compare(const Manifest& manifest, const std::vector<std::vector<at::Tensor>>& expected,
                            const std::vector<std::vector<at::Tensor>>& got);

}  // namespace coldpress
