#include "artifact.h"

#include <openssl/evp.h>
#include <torch/version.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <memory>
#include <sstream>

namespace coldpress {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int kFormatVersion = 1;
static_assert(std::pair(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR) >= std::pair(2, 11), "libtorch 2.11 or later is needed");

File file_from(const json& data) {
  File file{data.at("path"), data.at("digest"), data.at("size_bytes")};
  const fs::path path = file.path;
  if (path.empty() || path.is_absolute() || std::find(path.begin(), path.end(), "..") != path.end()) {
    throw Refused("manifest.json lists '" + file.path + "', which is outside the artifact's folder; pull the artifact again");
  }
  return file;
}

Payload payload_from(const json& data) {
  Payload payload{file_from(data), data.at("kind"), std::nullopt, false, {}, data.at("convention") == "flat"};
  if (const auto& count = data.at("num_threads"); !count.is_null()) payload.num_threads = count.get<int>();
  if (const auto layouts = data.find("layouts"); layouts != data.end() && !layouts->is_null()) {
    payload.packs_low_precision = layouts->size() > layouts->count("float32");
  }
  for (const auto& [name, bounds] : data.at("dims").items()) {
    payload.dims[name] = {bounds.at("min"), bounds.at("max"), bounds.value("multiple_of", std::int64_t{1})};
  }
  return payload;
}

Manifest manifest_from(const json& data) {
  Manifest manifest{};
  manifest.model = data.at("model");
  manifest.device_class = data.at("device_class");
  manifest.torch = data.at("needs").at("torch");
  manifest.inputs = data.at("inputs").at("inputs");
  manifest.structure = data.at("structure");
  manifest.positional = data.at("inputs").at("style") == "positional";
  manifest.stateful = data.at("stateful");
  manifest.eager_reference = data.at("reference") == "eager";
  // Payloads of other engines need Python; artifacts of earlier releases have others that need torch alone.
  const json& served = data.contains("fallback") ? data.at("fallback") : data;
  const json& recipe = served.at("recipe");
  if (const auto reset = recipe.find("reset"); reset != recipe.end() && !reset->is_null()) manifest.reset = *reset;
  manifest.optimize_for_inference = recipe.at("settings").value("optimize_for_inference", false);
  manifest.error_ratio_max = data.at("gate").at("error_ratio_max");
  for (const auto& item : served.at("payloads")) manifest.payloads.push_back(payload_from(item));
  // Only Python opens the program that serves sizes at which the others were measured slow; they accept these sizes too.
  const auto exported = [](const Payload& payload) { return payload.kind == "exported"; };
  if (!std::all_of(manifest.payloads.begin(), manifest.payloads.end(), exported)) std::erase_if(manifest.payloads, exported);
  for (const auto& item : data.at("files")) manifest.files.emplace(item.at("path"), file_from(item));
  for (const auto& item : data.at("outputs")) manifest.outputs.push_back(item.at("name"));
  for (const auto& item : data.at("golden")) {
    manifest.golden.push_back({item.at("point"), item.at("native_rmse"), item.value("scales", decltype(GoldenSet::scales){})});
  }
  return manifest;
}

// The x86-64 level: 3 is AVX2, 4 is AVX-512, 0 is anything less.
int level_of_this_cpu() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v4")) return 4;
  if (__builtin_cpu_supports("x86-64-v3")) return 3;
#endif
  return 0;
}

std::string upper(const char* variable) {
  const char* value = std::getenv(variable);
  std::string text = value ? value : "";
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

// The level that the environment limits oneDNN to, if it does.
std::optional<int> onednn_limit() {
  std::string limit = upper("ONEDNN_MAX_CPU_ISA");
  if (limit.empty()) limit = upper("DNNL_MAX_CPU_ISA");
  if (limit.empty() || limit == "ALL" || limit == "DEFAULT") return std::nullopt;
  if (limit.starts_with("AVX512") || limit.starts_with("AVX10")) return 4;
  return limit.starts_with("AVX2") ? 3 : 0;
}

// The environment in which oneDNN, ATen and MKL choose the same kernels as on a CPU of exactly this level.
std::string limits_of(int level) {
  return level == 4 ? "ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512 MKL_ENABLE_INSTRUCTIONS=AVX512"
                    : "ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2";
}

// The most specific Arm class of this CPU; empty on other CPUs.
std::string arm_class_of_this_cpu() {
#if defined(__aarch64__)
  // What -march of the classes implies; freezer/hardware/device_classes.py has the same.
  constexpr auto kV1 = HWCAP_CRC32 | HWCAP_ATOMICS | HWCAP_FPHP | HWCAP_ASIMDHP | HWCAP_ASIMDRDM | HWCAP_ASIMDDP | HWCAP_ASIMDFHM |
                       HWCAP_JSCVT | HWCAP_FCMA | HWCAP_LRCPC | HWCAP_ILRCPC | HWCAP_FLAGM | HWCAP_SVE;
  constexpr auto kV1Too = HWCAP2_BF16 | HWCAP2_I8MM | HWCAP2_SVEBF16 | HWCAP2_SVEI8MM;
  constexpr auto kV2Too = HWCAP2_SVE2 | HWCAP2_FLAGM2 | HWCAP2_FRINT;
  const auto has = getauxval(AT_HWCAP), has2 = getauxval(AT_HWCAP2);
  if ((has & kV1) == kV1 && (has2 & kV1Too) == kV1Too) {
    const int num_bits = 8 * (prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK);
    if (num_bits == 256) return "cpu-neoverse-v1";
    if (num_bits == 128 && (has & HWCAP_SB) && (has2 & kV2Too) == kV2Too) return "cpu-neoverse-v2";
  }
  return "cpu-aarch64";
#else
  return "";
#endif
}

// Packed weights fit the instructions that oneDNN chose. Only payloads with packed weights have a thread count.
bool is_packed(const Manifest& manifest) {
  return std::any_of(manifest.payloads.begin(), manifest.payloads.end(),
                     [](const Payload& payload) { return payload.num_threads.has_value(); });
}

void refuse_by_arm_class(const Manifest& manifest) {
  const std::string wanted = manifest.device_class, here = arm_class_of_this_cpu();
  if (wanted == here) return;
  if (here.empty() || wanted != "cpu-aarch64") {
    throw Refused("class_mismatch: the artifact is for " + wanted + ", and this CPU is " + (here.empty() ? "not of Arm" : here) +
                  "; pull an artifact of this CPU's class (coldpress pull --device-class)");
  }
  if (is_packed(manifest)) {
    throw Refused("isa_mismatch: weights packed for " + wanted + " are slower on " + here + "; pull this machine's own class");
  }
}

void refuse_by_x86_level(const Manifest& manifest, int wanted) {
  const int hardware = level_of_this_cpu();
  if (wanted > hardware) {
    throw Refused("class_mismatch: the artifact is for " + manifest.device_class + ", and this CPU is " +
                  (hardware ? "x86-64-v" + std::to_string(hardware) : std::string("none of x86-64-v3 or better")) +
                  "; pull an artifact of this CPU's class (coldpress pull --device-class)");
  }
  const auto limit = onednn_limit();
  const std::string aten = upper("ATEN_CPU_CAPABILITY");
  if (std::min(limit.value_or(4), aten == "DEFAULT" ? 0 : aten == "AVX2" ? 3 : 4) < wanted) {
    throw Refused("class_mismatch: the artifact is for " + manifest.device_class +
                  ", and ONEDNN_MAX_CPU_ISA or ATEN_CPU_CAPABILITY limits this process to less; unset them");
  }
  if (is_packed(manifest) && wanted < hardware && limit != wanted) {
    throw Refused("isa_mismatch: weights packed for " + manifest.device_class + " are 10 to 20 times slower on x86-64-v" +
                  std::to_string(hardware) + "; start this program with " + limits_of(wanted) +
                  ", or pull this machine's own class");
  }
  const bool low = std::any_of(manifest.payloads.begin(), manifest.payloads.end(),
                               [](const Payload& payload) { return payload.packs_low_precision; });
  if (low && upper("ONEDNN_MAX_CPU_ISA") != (wanted == 4 ? "AVX512_CORE" : "AVX2")) {
    throw Refused("isa_mismatch: weights of other dtypes than float32 are packed for exactly " + manifest.device_class +
                  "; start this program with " + limits_of(wanted));
  }
}

void refuse_by_class(const Manifest& manifest) {
  const std::string& name = manifest.device_class;
  const auto levels = std::map<std::string, int>{{"cpu-x86-64-v3", 3}, {"cpu-x86-64-v4", 4}};
  if (name == "portable") return;
  if (const auto level = levels.find(name); level != levels.end()) return refuse_by_x86_level(manifest, level->second);
  if (name == "cpu-aarch64" || name.starts_with("cpu-neoverse-")) return refuse_by_arm_class(manifest);
  throw Refused("got an artifact for " + name + ", this program serves cpu-x86-64-v3, cpu-x86-64-v4, Arm classes and portable;" +
                " pull one of those");
}

void refuse_by_torch(const Manifest& manifest) {
  int major = 0, minor = 0;
  if (std::sscanf(manifest.torch.c_str(), "%d.%d", &major, &minor) != 2) {
    throw Refused("manifest.json needs torch '" + manifest.torch + "', expected MAJOR.MINOR; pull the artifact again");
  }
  if (std::pair(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR) < std::pair(major, minor)) {
    throw Refused("torch_too_old: got libtorch " TORCH_VERSION ", expected " + manifest.torch +
                  " or later; build this program with one");
  }
}

void refuse_by_payload(const Manifest& manifest, const Payload& payload) {
  if (payload.kind != "inductor" && payload.kind != "torchscript") {
    throw Refused(payload.file.path + " is of kind '" + payload.kind + "', which " +
                  (payload.kind == "exported" ? "only Python opens" : "this program does not know") +
                  "; expected inductor or torchscript: pull or freeze such an artifact (coldpress pull --device-class)" +
                  (payload.kind == "onnxruntime" || payload.kind == "openvino"
                       ? "; freeze writes one beside OUT, to OUT.torch"
                       : ""));
  }
  const bool nested =
      std::any_of(manifest.inputs.begin(), manifest.inputs.end(), [](const json& item) { return item.contains("kind"); });
  if (!payload.flat && nested) {
    throw Refused(payload.file.path + " takes tuples, lists or dicts as its source does (native convention), which this program " +
                  "does not pass; serve it from Python, or freeze with inductor-frozen, whose payloads are flat");
  }
}

void add_tensor_names(const json& items, std::vector<std::string>& names) {
  for (const auto& item : items) {
    if (item.contains("kind")) {
      add_tensor_names(item.at("items"), names);
    } else if (!item.contains("value")) {
      names.push_back(item.at("name"));
    }
  }
}

std::string sha256_of(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  std::vector<char> block(1 << 20);
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  bool good = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  while (good && stream) {
    stream.read(block.data(), static_cast<std::streamsize>(block.size()));
    good = !stream.bad() && EVP_DigestUpdate(context.get(), block.data(), static_cast<std::size_t>(stream.gcount())) == 1;
  }
  unsigned int length = 0;
  if (!good || EVP_DigestFinal_ex(context.get(), digest.data(), &length) != 1) {
    throw Refused(path.string() + " cannot be read, so its digest cannot be verified");
  }
  std::ostringstream hex;
  hex << "sha256:" << std::hex << std::setfill('0');
  for (unsigned int i = 0; i < length; ++i) hex << std::setw(2) << static_cast<int>(digest[i]);
  return hex.str();
}

}  // namespace

bool Payload::accepts(const Point& point) const {
  return std::all_of(dims.begin(), dims.end(), [&](const auto& item) {
    const auto& [name, dim] = item;
    const auto size = point.at(name);
    return dim.min <= size && size <= dim.max && size % dim.multiple_of == 0;
  });
}

const File& Manifest::file(const std::string& path) const {
  const auto found = files.find(path);
  if (found == files.end()) throw Refused("manifest.json does not list " + path + "; pull the artifact again");
  return found->second;
}

void Manifest::keep_payloads_within(int num_threads) {
  int best = 0, least = 0;  // the largest count within num_threads, and the smallest of all
  for (const auto& payload : payloads) {
    const int count = payload.num_threads.value_or(0);
    if (count <= num_threads) best = std::max(best, count);
    if (count && (!least || count < least)) least = count;
  }
  std::erase_if(payloads, [&](const Payload& payload) { return payload.num_threads.value_or(best) != best; });
  if (payloads.empty()) {
    throw Refused("threads_mismatch: got " + std::to_string(num_threads) + " threads, expected at least " + std::to_string(least) +
                  ", which the weights are packed for; set OMP_NUM_THREADS to it, or freeze the model for this count");
  }
}

const Payload& Manifest::payload_for(const Point& point) const {
  const auto found = std::find_if(payloads.begin(), payloads.end(), [&](const Payload& payload) { return payload.accepts(point); });
  if (found == payloads.end()) throw Refused("manifest.json: no payload serves the sizes " + json(point).dump());
  return *found;
}

std::vector<std::string> Manifest::tensor_names() const {
  std::vector<std::string> names;
  add_tensor_names(inputs, names);
  return names;
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / "manifest.json";
  std::ifstream stream(path);
  if (!stream) throw Misused(folder.string() + " has no manifest.json; expected a folder that freeze or pull wrote");
  try {
    const json data = json::parse(stream);
    if (const auto& found = data.at("format_version"); found != kFormatVersion) {
      throw Refused(path.string() + ": format_version " + found.dump() + ", this program reads " + std::to_string(kFormatVersion) +
                    "; build it from the release that wrote the artifact");
    }
    return manifest_from(data);
  } catch (const json::exception& error) {
    throw Refused(path.string() + " is not a Coldpress manifest: " + error.what() + "; pull the artifact again");
  }
}

void refuse_what_cannot_be_served(const Manifest& manifest) {
  for (const auto& payload : manifest.payloads) refuse_by_payload(manifest, payload);
  refuse_by_torch(manifest);
  refuse_by_class(manifest);
}

void verify(const fs::path& folder, const File& file) {
  const fs::path path = folder / file.path;
  std::error_code missing;
  const auto size = fs::file_size(path, missing);
  if (missing) throw Refused(path.string() + " is missing; pull the artifact again");
  const std::string got = size == file.size_bytes ? sha256_of(path) : std::to_string(size) + " bytes long";
  const std::string expected = size == file.size_bytes ? file.digest : std::to_string(file.size_bytes) + " bytes";
  if (size != file.size_bytes || got != expected) {
    throw Refused(path.string() + " is " + got + ", expected " + expected + "; it was changed or damaged: pull the artifact again");
  }
}

}  // namespace coldpress
