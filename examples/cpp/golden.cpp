#include "golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <limits>
#include <map>
#include <set>
#include <sstream>

namespace coldpress {
namespace {

using nlohmann::json;

// The constants of freezer/compare/gate.py; docs/reference/measuring.md explains them.
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
  // Copy into the tensor's own memory: the file is aligned to 8 bytes, and complex128 needs 16.
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

bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

double tolerance_of(at::ScalarType dtype) { return is_half(dtype) ? 1e-2 : 1e-4 * eps_of(dtype) / eps_of(at::kFloat); }

std::string described(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes();
  return text.str();
}

struct Errors {
  double rmse, rms, max_abs_err;
};

struct Part {
  at::Tensor r, c;  // flat, finite, in double precision

  Errors errors() const {
    const auto mean_square = [](const at::Tensor& values) {
      return values.square().sum().item<double>() / static_cast<double>(std::max<std::int64_t>(values.numel(), 1));
    };
    const at::Tensor error = (c - r).abs();
    return {std::sqrt(mean_square(error)), std::sqrt(mean_square(r.abs())), error.numel() ? error.max().item<double>() : 0.0};
  }
};

// The elements that are finite in both, in groups of magnitudes; the small values first. A group may be empty.
std::vector<Part> parts_of(const at::Tensor& r, const at::Tensor& c, const std::vector<double>& limits) {
  const at::Tensor finite = r.isfinite().logical_and(c.isfinite());
  const auto wide = r.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor r64 = r.masked_select(finite).to(wide), c64 = c.masked_select(finite).to(wide), sizes = r64.abs();
  std::vector<Part> parts;
  double low = 0;
  for (std::size_t i = 0; i <= limits.size(); ++i) {
    const double high = i < limits.size() ? limits[i] : std::numeric_limits<double>::infinity();
    const at::Tensor chosen = sizes.ge(low).logical_and(sizes.lt(high));
    parts.push_back({r64.masked_select(chosen), c64.masked_select(chosen)});
    low = high;
  }
  return parts;
}

double bound_of(const Errors& errors, double native, const at::Tensor& r, double error_ratio_max, double eager_tol) {
  const double eps = eps_of(r.scalar_type()), floor = std::max(native, eps * errors.rms);
  const double multiplier = is_half(r.scalar_type()) || r.numel() < kSmallTensor ? 3.0 : 2.0;
  return std::max({error_ratio_max * floor, multiplier * native + tolerance_of(r.scalar_type()) * errors.rms / 10,
                   eager_tol * errors.rms});
}

// The problem with a part that must be equal: dtype, shape, integers, places of NaN and Inf; fill values except rounding.
std::string exact_problem(const at::Tensor& r, const at::Tensor& c, const std::vector<double>& limits) {
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
  if (!same) return "NaN or Inf at other places";
  const auto parts = parts_of(r, c, limits);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const Errors errors = parts[i].errors();
    if (!(errors.rmse <= std::max(kEagerReferenceTol, 4 * eps_of(r.scalar_type())) * errors.rms)) {
      std::ostringstream text;
      text << std::setprecision(3) << "the greatest values, of " << errors.rms << ", are off by " << errors.rmse;
      return text.str();
    }
  }
  return "";
}

// The largest error of the elements that are finite in both; rmse and rms are of the small values.
Errors errors_of(const at::Tensor& r, const at::Tensor& c, const std::vector<double>& limits) {
  const auto parts = parts_of(r, c, limits);
  Errors errors = parts[0].errors();
  for (const Part& part : parts) errors.max_abs_err = std::max(errors.max_abs_err, part.errors().max_abs_err);
  return errors;
}

// Whether OpenVINO's output validation passes: the absolute error in units of the rms; or the cosine, the relative error and the gain.
bool openvino_passes(const at::Tensor& r, const at::Tensor& c, const std::vector<double>& limits) {
  const bool bfloat16 = r.scalar_type() == at::kBFloat16, half = r.scalar_type() == at::kHalf;
  const double least_cosine = bfloat16 ? 0.99 : half ? 0.995 : 0.999;
  const double absolute = bfloat16 ? 2e-2 : half ? 1e-2 : 1e-4, relative = bfloat16 ? 1e-1 : half ? 5e-2 : 1e-3;
  const Part part = parts_of(r, c, limits)[0];
  if (!part.r.numel()) return true;
  const at::Tensor error = (part.c - part.r).abs(), one = part.r.abs(), other = part.c.abs();
  const Errors errors = part.errors();
  if (errors.max_abs_err <= absolute * errors.rms) return true;
  const double signal = one.square().sum().item<double>(), power = std::sqrt(signal * other.square().sum().item<double>());
  const double inner = at::real(part.c * part.r.conj()).sum().item<double>();
  const double rel = (error / at::maximum(one, other).clamp_min(eps_of(r.scalar_type()))).max().item<double>();
  const double gain_bound = absolute + relative / std::sqrt(static_cast<double>(part.r.numel()));
  return power > 0 && inner / power >= least_cosine && rel <= relative && std::abs(inner / signal - 1) <= gain_bound;
}

// The errors of one output over all golden sets; infinite if it cannot be compared.
Errors pooled(const std::vector<std::vector<at::Tensor>>& expected, const std::vector<std::vector<at::Tensor>>& got,
              std::size_t output, const std::vector<double>& limits) {
  std::vector<at::Tensor> r, c;
  for (std::size_t set = 0; set < expected.size(); ++set) {
    const auto &one = expected[set][output], &other = got[set][output];
    if (!exact_problem(one, other, limits).empty() || !comparable(one)) return {std::numeric_limits<double>::infinity(), 0.0, 0.0};
    r.push_back(one.flatten());
    c.push_back(other.flatten());
  }
  return errors_of(at::cat(r), at::cat(c), limits);
}

Figure figure_of(Figure figure, const at::Tensor& r, const at::Tensor& c, const Errors& pool, double native,
                 const std::vector<double>& limits, const Manifest& manifest) {
  figure.problem = exact_problem(r, c, limits);
  if (!figure.problem.empty() || !comparable(r)) return figure;
  auto [rmse, rms, worst] = errors_of(r, c, limits);
  figure.max_abs_err = worst;
  if (r.numel() < kPoolBelow) {
    rmse = pool.rmse;
    rms = pool.rms;
  }
  const double eps = eps_of(r.scalar_type()), floor = std::max(native, eps * rms);
  const double ratio = floor > 0 ? rmse / floor : rmse == 0 ? 0.0 : std::numeric_limits<double>::infinity();
  const double eager_tol = manifest.eager_reference ? std::max(kEagerReferenceTol, 4 * eps) : 0.0;
  const double bound = bound_of({rmse, rms, worst}, native, r, manifest.error_ratio_max, eager_tol);
  figure.error_ratio = ratio;
  if (!(rmse <= bound) && !(manifest.eager_reference && openvino_passes(r, c, limits))) {  // NaN fails
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
    std::vector<double> limits;  // magnitudes from which values are judged apart from all smaller ones
    if (!manifest.golden.empty() && manifest.golden[0].scales.contains(name)) limits = manifest.golden[0].scales.at(name);
    const Errors pool = pooled(expected, got, output, limits);
    for (std::size_t set = 0; set < expected.size(); ++set) {
      const auto& native = manifest.golden[set].native_rmse;
      const auto found = native.find(name);
      figures.push_back(figure_of({set, name, std::nullopt, 0.0, ""}, expected[set][output], got[set][output], pool,
                                  found == native.end() ? 0.0 : found->second, limits, manifest));
    }
  }
  return figures;
}

}  // namespace coldpress
