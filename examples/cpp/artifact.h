// An artifact folder: what its manifest says, whether this machine may serve it, and whether its bytes are what was
// published.
//
// Nothing here opens a payload. An Inductor package is code, so all of this comes first.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace coldpress {

// An artifact that cannot be served here, or is not what was published.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A command line that names no artifact.
struct Misused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Point = std::map<std::string, std::int64_t>;  // a size for every named dim

struct File {
  std::string path;    // in the artifact folder
  std::string digest;  // "sha256:" and 64 hex digits
  std::uintmax_t size_bytes;
};

struct Dim {
  std::int64_t min, max, multiple_of;
};

struct Payload {
  File file;
  std::string kind;                 // "inductor" and "torchscript" are served
  std::optional<int> num_threads;   // that its packed weights are laid out for
  bool packs_low_precision;         // weights of other dtypes than float32, which finer classes than x86-64's levels pack otherwise
  std::map<std::string, Dim> dims;  // the sizes that it accepts
  bool flat;                        // takes the tensors in order and gives a flat list; else it is called as the source model is

  bool accepts(const Point& point) const;
};

struct GoldenSet {
  Point point;
  std::map<std::string, double> native_rmse;  // by output
};

struct Manifest {
  std::string model, device_class, torch;  // torch: the least version, "2.13"
  nlohmann::json inputs, structure;        // docs/contract.md
  bool positional;                         // how a payload that is not flat is called
  bool stateful;
  bool eager_reference;         // golden outputs are eager's, where float64 could not run
  std::string reset;            // the method that brings back the initial state; empty where there is none
  bool optimize_for_inference;  // TorchScript payloads are optimized when they are opened
  double error_ratio_max;
  std::vector<Payload> payloads;
  std::map<std::string, File> files;
  std::vector<std::string> outputs;
  std::vector<GoldenSet> golden;

  // The record of a file other than a payload.
  const File& file(const std::string& path) const;
  // Leaves the payloads that serve a program which may use so many threads: those for just that count or for any, else
  // those for the largest count below it. Throws Refused where all are laid out for more.
  void keep_payloads_within(int num_threads);
  // The first payload that serves inputs of these sizes: the most special one.
  const Payload& payload_for(const Point& point) const;
  // The paths of the tensor inputs, those within tuples, lists and dicts too, in the order that flat payloads take
  // them.
  std::vector<std::string> tensor_names() const;
};

// The manifest of a folder. Throws Misused where there is none, Refused where it cannot be read.
Manifest read_manifest(const std::filesystem::path& folder);

// Throws Refused with the reason and the remedy, from the manifest alone.
void refuse_what_cannot_be_served(const Manifest& manifest);

// Throws Refused unless the file has the size and the SHA-256 digest that the manifest names.
void verify(const std::filesystem::path& folder, const File& file);

}  // namespace coldpress
