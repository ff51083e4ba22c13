// coldpress-verify DIR: verify an artifact folder and run its golden inputs here, with libtorch and without Python.
//
// verify_folder, at the end, takes the steps of every deployment: manifest -> refuse -> digests -> open -> canary.
// Exit codes: 0 correct here; 1 refused or wrong; 2 usage.
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>

#include "artifact.h"
#include "golden.h"

namespace {

using namespace coldpress;
using nlohmann::json;
namespace fs = std::filesystem;

constexpr auto kGoldenInputs = "golden/inputs.safetensors";
constexpr auto kGoldenOutputs = "golden/outputs.safetensors";

using TensorList = std::vector<at::Tensor>;

struct Opened {
  std::function<TensorList(const TensorList&)> run;  // tensor inputs and outputs in the manifest's order
  std::function<void()> reset;                       // restores the initial state
};

Opened open_inductor(const fs::path& path) {
  auto loader = std::make_shared<torch::inductor::AOTIModelPackageLoader>(path.string());
  return {[loader](const TensorList& inputs) { return loader->run(inputs); }, [] {}};  // stateless
}

// A constant input. TorchScript does not accept an int for a float; Python would convert it.
at::IValue constant_from(const json& value, const c10::TypePtr& type) {
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return value.get<std::string>();
  const bool whole = value.is_number_integer() && c10::IntType::get()->isSubtypeOf(*type);
  return whole ? at::IValue(value.get<std::int64_t>()) : at::IValue(value.get<double>());
}

// Call a payload with the signature of its source: by name or by position, with the constants.
at::IValue call_as_source(torch::jit::Method& forward, const Manifest& manifest, const TensorList& inputs) {
  const auto& schema = forward.function().getSchema();
  std::vector<at::IValue> args;
  torch::jit::Kwargs kwargs;
  auto next = inputs.begin();
  for (const auto& item : manifest.inputs) {
    const std::string name = item.at("name");
    // Argument 0 is self.
    const int place = manifest.positional ? static_cast<int>(args.size()) + 1 : schema.argumentIndexWithName(name).value_or(-1);
    if (place < 1 || place >= static_cast<int>(schema.arguments().size())) {
      throw Refused("forward takes no input '" + name + "'");
    }
    auto value = item.contains("value") ? constant_from(item.at("value"), schema.arguments()[place].type()) : *next++;
    manifest.positional ? args.push_back(std::move(value)) : void(kwargs.emplace(name, std::move(value)));
  }
  return forward(std::move(args), kwargs);
}

// Collect the tensors of a result, in the order of the manifest's structure.
void flatten(const json& structure, const at::IValue& value, TensorList& leaves) {
  const std::string kind = structure.at("kind");
  if (kind == "constant") return;
  if (kind == "tensor") return leaves.push_back(value.toTensor());
  const json& items = structure.at("items");
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    for (std::size_t i = 0; i < items.size(); ++i) {
      flatten(items[i], dict.at(structure.at("keys")[i].get<std::string>()), leaves);
    }
    return;
  }
  if (!value.isTuple() && !value.isList()) throw Refused("got a result of type " + value.tagKind() + ", expected " + kind);
  const auto parts = value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
  if (parts.size() != items.size()) {
    throw Refused("got a result of " + std::to_string(parts.size()) + " parts, expected " + std::to_string(items.size()));
  }
  for (std::size_t i = 0; i < items.size(); ++i) flatten(items[i], parts[i], leaves);
}

Opened open_torchscript(const fs::path& path, const Manifest& manifest, bool flat) {
  auto module = torch::jit::load(path.string(), at::kCPU);  // in eval mode, as it was saved
  if (manifest.optimize_for_inference) {                    // its result cannot be saved, so every loader applies it
    std::vector<std::string> others;
    for (const auto& method : module.get_methods()) {
      if (method.name() != "forward") others.push_back(method.name());
    }
    module = torch::jit::optimize_for_inference(module, others);
  }
  const auto run = [module, manifest, flat](const TensorList& inputs) {
    TensorList leaves;
    auto forward = module.get_method("forward");
    if (flat) {
      const auto result = forward({inputs.begin(), inputs.end()});
      for (const auto& item : result.toTupleRef().elements()) leaves.push_back(item.toTensor());
    } else {
      flatten(manifest.structure, call_as_source(forward, manifest, inputs), leaves);
    }
    return leaves;
  };
  return {run, [module, manifest] {
            if (!manifest.reset.empty()) module.get_method(manifest.reset)({});
          }};
}

// The tensors of one golden set, "<index>/<name>" in the file, in the order of the names.
TensorList golden_tensors(const Tensors& file, std::size_t index, const std::vector<std::string>& names) {
  TensorList found;
  for (const auto& name : names) {
    const auto tensor = file.find(std::to_string(index) + "/" + name);
    if (tensor == file.end()) {
      throw Refused("golden set " + std::to_string(index) + " has no tensor '" + name + "'; pull the artifact again");
    }
    found.push_back(tensor->second);
  }
  return found;
}

std::vector<Figure> run_canary(const fs::path& folder, const Manifest& manifest) {
  const Tensors inputs = read_tensors(folder / kGoldenInputs), outputs = read_tensors(folder / kGoldenOutputs);
  std::map<std::string, Opened> opened;
  for (const auto& payload : manifest.payloads) {
    const fs::path path = folder / payload.file.path;
    opened[payload.file.path] = payload.kind == "inductor" ? open_inductor(path) : open_torchscript(path, manifest, payload.flat);
  }
  // Without a reset method, only the first set of a stateful model starts from the initial state.
  const bool once = manifest.stateful && manifest.reset.empty();
  const std::size_t num_sets = std::min<std::size_t>(manifest.golden.size(), once ? 1 : manifest.golden.size());
  std::vector<TensorList> expected, got;
  for (std::size_t index = 0; index < num_sets; ++index) {
    const Payload& payload = manifest.payload_for(manifest.golden[index].point);
    const auto& [run, reset] = opened.at(payload.file.path);
    if (payload.num_threads) at::set_num_threads(*payload.num_threads);  // the count that its weights are packed for
    if (index) reset();
    expected.push_back(golden_tensors(outputs, index, manifest.outputs));
    got.push_back(run(golden_tensors(inputs, index, manifest.tensor_names())));
    if (got.back().size() != manifest.outputs.size()) {
      throw Refused(payload.file.path + " returned " + std::to_string(got.back().size()) + " tensors, expected " +
                    std::to_string(manifest.outputs.size()));
    }
  }
  if (got.empty()) throw Refused("the artifact has no golden set, so its outputs cannot be checked; pull it again");
  return compare(manifest, expected, got);
}

void verify_folder(const fs::path& folder) {
  Manifest manifest = read_manifest(folder);
  refuse_what_cannot_be_served(manifest);
  std::vector<File> needed{manifest.file(kGoldenInputs), manifest.file(kGoldenOutputs)};
  for (const auto& payload : manifest.payloads) needed.push_back(payload.file);
  manifest.keep_payloads_within(at::get_num_threads());
  for (const auto& file : needed) verify(folder, file);

  const at::NoGradGuard no_grad;
  const auto figures = run_canary(folder, manifest);
  bool right = true;
  std::printf("golden set  error ratio  max abs err  output\n");
  for (const auto& figure : figures) {
    char ratio[16] = "";
    if (figure.error_ratio) std::snprintf(ratio, sizeof ratio, "%.2f", *figure.error_ratio);
    std::printf("%10zu  %11s  %11.3g  %s%s%s\n", figure.set_index, ratio, figure.max_abs_err, figure.output.c_str(),
                figure.problem.empty() ? "" : ": ", figure.problem.c_str());
    right = right && figure.problem.empty();
  }
  const std::string what = manifest.model + " for " + manifest.device_class;
  if (!right) throw Refused(what + ": the outputs differ on this machine; do not serve it here");
  std::printf("%s: %zu files are intact, and %s is correct here\n", folder.c_str(), needed.size(), what.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw Misused("usage: coldpress-verify DIR, an artifact folder that freeze or pull wrote");
    verify_folder(argv[1]);
    return 0;
  } catch (const Misused& error) {
    std::cerr << error.what() << "\n";
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << "libtorch: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}
