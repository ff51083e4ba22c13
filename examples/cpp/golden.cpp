#include "golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <limits>
#include <set>
#include <sstream>

namespace coldpress {
namespace {

using nlohmann::json;

// The figures of freezer/drift.py and freezer/canary.py; docs/measuring.md explains them.
constexpr std::int64_t kPoolBelow = 64;
constexpr std::int64_t kSmallTensor = 1000;
constexpr double kEagerReferenceTol = 1e-3;

at::ScalarType dtype_from(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> dtypes{
      {"F64", at::kDouble},       {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16},
      {"C64", at::kComplexFloat}, {"I64", at::kLong},  {"I32", at::kInt},  {"I16", at::kShort},
      {"I8", at::kChar},          {"U8", at::kByte},   {"BOOL", at::kBool}};
  const auto found = dtypes.find(name);
  if (found == dtypes.end()) throw Refused("dtype " + name + " is unknown");
  return found->second;
}

at::Tensor tensor_from(const json& record, const std::vector<char>& bytes, std::size_t data_start) {
  // A tensor's own memory, and a copy into it: the file is aligned to 8 bytes, and complex128 wants 16.
  const auto shape = record.at("shape").get<std::vector<std::int64_t>>();
  at::Tensor tensor = at::empty(shape, dtype_from(record.at("dtype")));
  const auto [begin, end] = record.at("data_offsets").get<std::pair<std::size_t, std::size_t>>();
  if (begin > end || end > bytes.size() - data_start || end - begin != tensor.nbytes()) {
    throw Refused("the offsets of a tensor do not fit its shape and the file's size");
  }
  if (begin < end) std::memcpy(tensor.mutable_data_ptr(), bytes.data() + data_start + begin, end - begin);
  return tensor;
}

bool comparable(const at::Tensor& tensor) { return tensor.is_floating_point() || tensor.is_complex(); }

double eps_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return std::ldexp(1.0, -10);
    case at::kBFloat16:
      return std::ldexp(1.0, -7);
    case at::kDouble:
    case at::kComplexDouble:
      return std::numeric_limits<double>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

std::string described(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes();
  return text.str();
}

// What differs in what must be the same exactly: dtype, shape, integers, the places of NaN and Inf.
std::string exact_problem(const at::Tensor& r, const at::Tensor& c) {
  if (r.scalar_type() != c.scalar_type() || r.sizes() != c.sizes()) {
    return "got " + described(c) + ", expected " + described(r);
  }
  if (!comparable(r)) {
    const auto wrong = r.ne(c).sum().item<std::int64_t>();
    return wrong ? std::to_string(wrong) + " of " + std::to_string(r.numel()) + " elements differ" : "";
  }
  const at::Tensor infinite = r.isinf();
  const bool same = at::equal(r.isnan(), c.isnan()) && at::equal(infinite, c.isinf()) &&
                    at::equal(r.masked_select(infinite), c.masked_select(infinite));
  return same ? "" : "NaN or Inf at other places";
}

struct Errors {
  double rmse, rms, max_abs_err;
};

// Over elements that are finite in both.
Errors errors_of(const at::Tensor& r, const at::Tensor& c) {
  const at::Tensor finite = r.isfinite().logical_and(c.isfinite());
  const auto wide = r.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor r64 = r.masked_select(finite).to(wide), c64 = c.masked_select(finite).to(wide);
  const at::Tensor error = (c64 - r64).abs();
  const auto mean_square = [&](const at::Tensor& values) {
    return values.square().sum().item<double>() / static_cast<double>(std::max<std::int64_t>(values.numel(), 1));
  };
  return {std::sqrt(mean_square(error)), std::sqrt(mean_square(r64.abs())), error.numel() ? error.max().item<double>() : 0.0};
}

// One output over all golden sets; infinitely wrong where it cannot be compared.
Errors pooled(const std::vector<std::vector<at::Tensor>>& expected, const std::vector<std::vector<at::Tensor>>& got,
              std::size_t output) {
  std::vector<at::Tensor> r, c;
  for (std::size_t set = 0; set < expected.size(); ++set) {
    const auto &one = expected[set][output], &other = got[set][output];
    if (!exact_problem(one, other).empty() || !comparable(one)) return {std::numeric_limits<double>::infinity(), 0.0, 0.0};
    r.push_back(one.flatten());
    c.push_back(other.flatten());
  }
  return errors_of(at::cat(r), at::cat(c));
}

Figure figure_of(Figure figure, const at::Tensor& r, const at::Tensor& c, const Errors& pool, double native,
                 const Manifest& manifest) {
  figure.problem = exact_problem(r, c);
  if (!figure.problem.empty() || !comparable(r)) return figure;
  auto [rmse, rms, worst] = errors_of(r, c);
  figure.max_abs_err = worst;
  if (r.numel() < kPoolBelow) {
    rmse = pool.rmse;
    rms = pool.rms;
  }
  const double eps = eps_of(r.scalar_type());
  const bool half = r.scalar_type() == at::kHalf || r.scalar_type() == at::kBFloat16;
  const double floor = std::max(native, eps * rms);
  const double ratio = floor > 0 ? rmse / floor : rmse == 0 ? 0.0 : std::numeric_limits<double>::infinity();
  const double multiplier = half || r.numel() < kSmallTensor ? 3.0 : 2.0;
  const double tol = (half ? 1e-2 : 1e-4 * eps / eps_of(at::kFloat)) * rms;
  const double reference_tol = manifest.eager_reference ? std::max(kEagerReferenceTol, 4 * eps) * rms : 0.0;
  const double bound = std::max({manifest.error_ratio_max * floor, multiplier * native + tol / 10, reference_tol});
  figure.error_ratio = ratio;
  if (!(rmse <= bound)) {  // so written that NaN fails
    std::ostringstream text;
    text << std::setprecision(3) << "rmse " << rmse << " > " << bound << " (error_ratio " << ratio << ")";
    figure.problem = text.str();
  }
  return figure;
}

}  // namespace

Tensors read_tensors(const std::filesystem::path& path) {
  // 8 bytes, little-endian: the header's length; the header, JSON: dtype, shape and offsets by name; the data.
  std::ifstream stream(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
  std::uint64_t length = 0;
  try {
    if (bytes.size() < sizeof length) throw Refused("it has no header");
    for (std::size_t i = sizeof length; i-- > 0;) length = length << 8 | static_cast<unsigned char>(bytes[i]);
    if (length > bytes.size() - sizeof length) throw Refused("its header is longer than the file");
    const std::size_t data_start = sizeof length + length;
    const json header = json::parse(bytes.begin() + sizeof length, bytes.begin() + static_cast<std::ptrdiff_t>(data_start));
    // safetensors has no complex128: such a tensor is float64 with a last dim of 2, and the metadata names it.
    std::set<std::string> pairs;
    if (const auto metadata = header.find("__metadata__"); metadata != header.end() && metadata->contains("complex128")) {
      pairs = json::parse(metadata->at("complex128").get<std::string>()).get<std::set<std::string>>();
    }
    Tensors tensors;
    for (const auto& [name, record] : header.items()) {
      if (name == "__metadata__") continue;
      const at::Tensor tensor = tensor_from(record, bytes, data_start);
      tensors[name] = pairs.contains(name) ? at::view_as_complex(tensor) : tensor;
    }
    return tensors;
  } catch (const std::exception& error) {
    throw Refused(path.string() + " cannot be read as safetensors: " + error.what());
  }
}

std::vector<Figure> compare(const Manifest& manifest, const std::vector<std::vector<at::Tensor>>& expected,
                            const std::vector<std::vector<at::Tensor>>& got) {
  std::vector<Figure> figures;
  for (std::size_t output = 0; output < manifest.outputs.size(); ++output) {
    const std::string& name = manifest.outputs[output];
    const Errors pool = pooled(expected, got, output);
    for (std::size_t set = 0; set < expected.size(); ++set) {
      const auto& native = manifest.golden[set].native_rmse;
      const auto found = native.find(name);
      figures.push_back(figure_of({set, name, std::nullopt, 0.0, ""}, expected[set][output], got[set][output], pool,
                                  found == native.end() ? 0.0 : found->second, manifest));
    }
  }
  return figures;
}

}  // namespace coldpress
