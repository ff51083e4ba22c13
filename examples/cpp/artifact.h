// An artifact folder: its manifest, whether this machine may serve it, and whether its files are intact.
//
// All of this happens before a payload is opened, because an Inductor package is code.
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

// The artifact cannot be served here, or is damaged.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The command line does not name an artifact.
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
  std::optional<int> num_threads;   // that its weights are packed for
  bool packs_low_precision;         // other dtypes than float32, whose layout differs between classes of one x86-64 level
  std::map<std::string, Dim> dims;  // the sizes that it accepts
  bool flat;                        // takes and returns flat lists of tensors; otherwise it has the signature of the source model

  bool accepts(const Point& point) const;
};

struct GoldenSet {
  Point point;
  std::map<std::string, double> native_rmse;  // by output
  std::map<std::string, std::vector<double>> scales;  // by output: magnitudes from which values are judged apart
};

struct Manifest {
  std::string model, device_class, torch;  // torch: the minimum version, "2.13"
  nlohmann::json inputs, structure;        // docs/reference/contract.md
  bool positional;                         // how a payload that is not flat is called
  bool stateful;
  bool eager_reference;         // golden outputs are eager's, because float64 could not run
  std::string reset;            // the method that restores the initial state; empty if there is none
  bool optimize_for_inference;  // TorchScript payloads are optimized when they are opened
  double error_ratio_max;
  std::vector<Payload> payloads;
  std::map<std::string, File> files;
  std::vector<std::string> outputs;
  std::vector<GoldenSet> golden;

  // The record of a file other than a payload.
  const File& file(const std::string& path) const;
  // Keep the payloads for this number of threads or for any, or else those for the largest count below it. Throws
  // Refused if all of them need more threads.
  void keep_payloads_within(int num_threads);
  // The first payload that accepts these sizes, which is the most specialized one.
  const Payload& payload_for(const Point& point) const;
  // The paths of the tensor inputs, including those in tuples, lists and dicts, in the order of flat payloads.
  std::vector<std::string> tensor_names() const;
};

// Read the manifest of a folder. Throws Misused if there is none, and Refused if it cannot be read.
Manifest read_manifest(const std::filesystem::path& folder);

// Throws Refused with the reason and the remedy if the manifest shows that this program cannot serve the artifact.
void refuse_what_cannot_be_served(const Manifest& manifest);

// Throws Refused unless the file has the size and the SHA-256 digest of the manifest.
void verify(const std::filesystem::path& folder, const File& file);

}  // namespace coldpress
