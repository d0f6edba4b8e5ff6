// Used only by commlib/kernels/native_codecs.py, which checks every tensor whose address it passes: types, devices,
// sizes, overlaps. Only numbers that index tables are checked here. All kernels run without the GIL.
#include "codec_bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "block_top_k.h"
#include "codec.h"
#include "sparse.h"

namespace py = pybind11;

namespace commlib {
namespace {

using Address = std::uintptr_t;

const CodecShape& shape_of(int codec) {
  const CodecShape* shape = find_shape(codec);
  if (shape == nullptr) throw std::invalid_argument("no block codec has the id " + std::to_string(codec));
  return *shape;
}

DType type_of(int type) {
  if (type < 0 || type >= kNumDTypes) throw std::invalid_argument("no such type: " + std::to_string(type));
  return static_cast<DType>(type);
}

// The constants of the kernels by codec id; native.py checks them against its own table.
py::dict block_codecs() {
  py::dict found;
  for (int codec = 0; codec < kCodecIds; ++codec) {
    const CodecShape* shape = find_shape(codec);
    if (shape == nullptr) continue;
    found[py::int_(codec)] =
        py::dict(py::arg("name") = shape->name, py::arg("portion") = shape->block, py::arg("bits") = shape->bits,
                 py::arg("scale_bytes") = shape->scale_bytes, py::arg("minimum_bytes") = shape->minimum_bytes,
                 py::arg("is_one_block") = shape->is_one_block);
  }
  return found;
}

std::size_t payload_bytes(int codec, std::size_t numel) {
  return Layout(shape_of(codec), numel).payload_bytes;
}

// Philox's key and counter, and the segments with their global offsets.
struct RandomSource {
  std::vector<Segment> segments;
  Random random;

  RandomSource(const RandomSource&) = delete;
  RandomSource& operator=(const RandomSource&) = delete;
  RandomSource(std::uint64_t seed, std::uint32_t step, std::uint32_t stage_and_rank,
               const std::vector<std::pair<std::uint64_t, std::uint64_t>>& places) {
    for (const auto& [start, offset] : places) segments.push_back({start, offset});
    if (segments.empty() || segments.front().start != 0)
      throw std::invalid_argument("segments must begin at element 0");
    for (std::size_t i = 1; i < segments.size(); ++i) {
      if (segments[i].start <= segments[i - 1].start) throw std::invalid_argument("segments must ascend");
    }
    random = {{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
              step,
              stage_and_rank,
              segments.data(),
              segments.size()};
  }
};

struct Feedback {
  Address residual;
  float beta, gamma;
};

// `count` consecutive payloads of one chunk, and the divisor of their sum.
struct Payloads {
  Address at;
  std::size_t count;
  float divisor;
};

// A momentum (fp32) at `at`, updated to decay * momentum + factor * gradient.
struct Velocity {
  Address at;
  float decay, factor;
};

EncodeJob new_job(const CodecShape& shape, const Feedback& feedback, const RandomSource* source, std::size_t first,
                  std::size_t numel, std::uint8_t* payload) {
  return {nullptr,
          DType::kFloat32,
          nullptr,
          0,
          1.0f,
          reinterpret_cast<float*>(feedback.residual),
          feedback.beta,
          feedback.gamma,
          source == nullptr ? nullptr : &source->random,
          first,
          numel,
          Layout(shape, numel),
          payload,
          false,
          false};
}

// Splits `x` into chunks of `chunk` elements. Payload i starts at i times the size of a full one.
void encode(int codec, Address x, int type, std::size_t numel, std::size_t chunk, Feedback feedback,
            const RandomSource* source, Address out, int num_threads) {
  const CodecShape& shape = shape_of(codec);
  const DType dtype = type_of(type);
  if (chunk == 0) throw std::invalid_argument("a chunk has at least one element");
  const std::size_t distance = Layout(shape, chunk).payload_bytes;
  const Address residual = feedback.residual;
  const bool is_large = exceeds_cache(numel * element_bytes(dtype));
  // Payloads stream from half the size on, because the tensor passes through the cache as well.
  const bool streams = exceeds_cache((numel + chunk - 1) / chunk * distance * 2);
  const py::gil_scoped_release released;
  for (std::size_t first = 0; first < numel; first += chunk) {
    if (residual != 0) feedback.residual = residual + first * sizeof(float);
    auto* payload = reinterpret_cast<std::uint8_t*>(out) + first / chunk * distance;
    EncodeJob job = new_job(shape, feedback, source, first, std::min(chunk, numel - first), payload);
    job.x = reinterpret_cast<const std::uint8_t*>(x) + first * element_bytes(dtype);
    job.type = dtype;
    job.exceeds_cache = is_large;
    job.streams = streams;
    encode_chunk(codec, job, num_threads);
  }
}

// Returns the addresses of payloads of `nbytes` each; valid until this thread's next call.
const std::vector<const std::uint8_t*>& rows(const Payloads& payloads, std::size_t nbytes) {
  if (payloads.count == 0) throw std::invalid_argument("a sum needs at least one payload");
  static thread_local std::vector<const std::uint8_t*> pointers;  // keeps its memory between calls
  pointers.resize(payloads.count);
  for (std::size_t i = 0; i < payloads.count; ++i) {
    pointers[i] = reinterpret_cast<const std::uint8_t*>(payloads.at) + i * nbytes;
  }
  return pointers;
}

// Encodes the sum of payloads; the chunk starts at element `first` of the tensor.
void encode_sum(int codec, const Payloads& payloads, std::size_t numel, Feedback feedback, const RandomSource* source,
                std::size_t first, Address out, int num_threads) {
  const CodecShape& shape = shape_of(codec);
  const std::size_t distance = Layout(shape, numel).payload_bytes;
  const auto& inputs = rows(payloads, distance);
  const py::gil_scoped_release released;
  EncodeJob job = new_job(shape, feedback, source, first, numel, reinterpret_cast<std::uint8_t*>(out));
  job.inputs = inputs.data();
  job.num_inputs = payloads.count;
  job.divisor = payloads.divisor;
  job.streams = exceeds_cache((payloads.count + 1) * distance / 2);  // the threshold is half the cache
  encode_chunk(codec, job, num_threads);
}

void decode(int codec, Address payloads, std::size_t numel, std::size_t chunk, Address out, int type, bool adds,
            float weight, int num_threads) {
  const CodecShape& shape = shape_of(codec);
  const DType dtype = type_of(type);
  if (chunk == 0) throw std::invalid_argument("a chunk has at least one element");
  const std::size_t distance = Layout(shape, chunk).payload_bytes;
  const bool streams = !adds && exceeds_cache(numel * element_bytes(dtype));  // else `out` is cached
  const py::gil_scoped_release released;
  for (std::size_t first = 0; first < numel; first += chunk) {
    const auto* payload = reinterpret_cast<const std::uint8_t*>(payloads) + first / chunk * distance;
    const std::size_t count = std::min(chunk, numel - first);
    void* to = reinterpret_cast<std::uint8_t*>(out) + first * element_bytes(dtype);
    decode_chunk(codec, {&payload, 1, 1.0f, adds, weight, to, dtype, count, Layout(shape, count), streams},
                 num_threads);
  }
}

void decode_sum(int codec, const Payloads& payloads, std::size_t numel, Address out, int type, int num_threads) {
  const CodecShape& shape = shape_of(codec);
  const DType dtype = type_of(type);
  const Layout layout(shape, numel);
  const auto& inputs = rows(payloads, layout.payload_bytes);
  const py::gil_scoped_release released;
  decode_chunk(codec,
               {inputs.data(), payloads.count, payloads.divisor, false, 1.0f, reinterpret_cast<void*>(out), dtype,
                numel, layout, exceeds_cache(numel * element_bytes(dtype))},
               num_threads);
}

void rotate(Address x, std::size_t numel, const RandomSource& source, bool is_inverse, Address out, int num_threads) {
  const RotateJob job = {reinterpret_cast<const float*>(x), reinterpret_cast<float*>(out), numel, &source.random,
                         is_inverse};
  const py::gil_scoped_release released;
  rotate_chunk(job, num_threads);
}

// A copy with non-temporal stores, as a baseline for benchmarks.
void stream_copy(Address to, Address from, std::size_t nbytes) {
  const py::gil_scoped_release released;
  active_kernels().codecs->stream_copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
}

SparseSource sparse_source(Address x, int type, std::size_t numel, const Feedback& feedback) {
  auto* residual = reinterpret_cast<float*>(feedback.residual);
  return {reinterpret_cast<const void*>(x), type_of(type), residual, feedback.beta, feedback.gamma, numel};
}

void encode_top_k_at(Address x, int type, std::size_t numel, std::size_t places, const Feedback& feedback, Address out,
                     int num_threads) {
  const SparseSource source = sparse_source(x, type, numel, feedback);
  const py::gil_scoped_release released;
  encode_top_k(source, places, reinterpret_cast<std::uint8_t*>(out), num_threads);
}

void encode_above_at(Address x, int type, std::size_t numel, std::size_t places, std::uint32_t threshold_bits,
                     const Feedback& feedback, Address out, int num_threads) {
  const SparseSource source = sparse_source(x, type, numel, feedback);
  const py::gil_scoped_release released;
  encode_above(source, threshold_bits, places, reinterpret_cast<std::uint8_t*>(out), num_threads);
}

void encode_random_k_at(Address x, int type, std::size_t numel, std::size_t places, const RandomSource& random,
                        const Feedback& feedback, Address out, int num_threads) {
  const SparseSource source = sparse_source(x, type, numel, feedback);
  const Random& key = random.random;
  const py::gil_scoped_release released;
  encode_random_k(source, key.key, key.step, key.stage_and_rank, places, reinterpret_cast<std::uint8_t*>(out),
                  num_threads);
}

// Returns -1, or the index of the first invalid payload, in which case nothing was written.
std::int64_t decode_sparse_at(const Payloads& payloads, std::size_t places, bool adds, float weight, Address out,
                              std::size_t numel, int num_threads) {
  const auto& inputs = rows(payloads, sparse_payload_bytes(places));
  const py::gil_scoped_release released;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!sparse_is_valid(inputs[i], places, numel, num_threads)) return static_cast<std::int64_t>(i);
  }
  auto* to = reinterpret_cast<float*>(out);
  if (adds) {
    for (const std::uint8_t* input : inputs) add_sparse(input, places, weight, to, numel, num_threads);
  } else {
    sum_sparse(inputs.data(), inputs.size(), places, payloads.divisor, to, numel, num_threads);
  }
  return -1;
}

void encode_block_top_k_at(Address x, int type, std::size_t numel, std::size_t kept, const Feedback& feedback,
                           Address out, int num_threads) {
  const SparseSource source = sparse_source(x, type, numel, feedback);
  const py::gil_scoped_release released;
  encode_block_top_k(source, {numel, kept}, reinterpret_cast<std::uint8_t*>(out), num_threads);
}

// Returns the same as decode_sparse_at.
std::int64_t decode_block_top_k_at(const Payloads& payloads, std::size_t kept, bool adds, float weight, Address out,
                                   std::size_t numel, int num_threads) {
  const BlockTopKLayout layout(numel, kept);
  const auto& inputs = rows(payloads, layout.nbytes);
  const py::gil_scoped_release released;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!block_top_k_is_valid(inputs[i], layout, num_threads)) return static_cast<std::int64_t>(i);
  }
  auto* to = reinterpret_cast<float*>(out);
  if (adds) {
    for (const std::uint8_t* input : inputs) add_block_top_k(input, layout, weight, to, num_threads);
  } else {
    sum_block_top_k(inputs.data(), inputs.size(), layout, payloads.divisor, to, num_threads);
  }
  return -1;
}

// Returns whether the whole gradient is finite.
bool encode_momentum_at(Address gradient, int type, std::size_t numel, const Velocity& velocity, std::size_t places,
                        const Feedback& feedback, Address out, int num_threads) {
  const Momentum momentum = {reinterpret_cast<const void*>(gradient), type_of(type), velocity.decay, velocity.factor,
                             reinterpret_cast<float*>(velocity.at)};
  const SparseSource source = sparse_source(velocity.at, static_cast<int>(DType::kFloat32), numel, feedback);
  const py::gil_scoped_release released;
  return encode_momentum(momentum, source, places, reinterpret_cast<std::uint8_t*>(out), num_threads);
}

}  // namespace

void bind_codecs(py::module_& module) {
  py::class_<RandomSource>(module, "RandomSource")
      .def(py::init<std::uint64_t, std::uint32_t, std::uint32_t,
                    const std::vector<std::pair<std::uint64_t, std::uint64_t>>&>(),
           py::arg("seed"), py::arg("step"), py::arg("stage_and_rank"), py::arg("segments"));
  py::class_<Feedback>(module, "Feedback")
      .def(py::init<Address, float, float>(), py::arg("residual"), py::arg("beta"), py::arg("gamma"));
  py::class_<Payloads>(module, "Payloads")
      .def(py::init<Address, std::size_t, float>(), py::arg("at"), py::arg("count"), py::arg("divisor"));
  py::class_<Velocity>(module, "Velocity")
      .def(py::init<Address, float, float>(), py::arg("at"), py::arg("decay"), py::arg("factor"));
  module.def("stream_copy", &stream_copy, py::arg("dst"), py::arg("src"), py::arg("nbytes"));
  module.def("rotate", &rotate, py::arg("x"), py::arg("numel"), py::arg("random"), py::arg("is_inverse"),
             py::arg("out"), py::arg("num_threads"));
  module.def("sparse_payload_bytes", &sparse_payload_bytes, py::arg("places"));
  module.def("encode_top_k", &encode_top_k_at, py::arg("x"), py::arg("type"), py::arg("numel"), py::arg("places"),
             py::arg("feedback"), py::arg("out"), py::arg("num_threads"));
  module.def("encode_above", &encode_above_at, py::arg("x"), py::arg("type"), py::arg("numel"), py::arg("places"),
             py::arg("threshold_bits"), py::arg("feedback"), py::arg("out"), py::arg("num_threads"));
  module.def("encode_random_k", &encode_random_k_at, py::arg("x"), py::arg("type"), py::arg("numel"), py::arg("places"),
             py::arg("random"), py::arg("feedback"), py::arg("out"), py::arg("num_threads"));
  module.def("decode_sparse", &decode_sparse_at, py::arg("payloads"), py::arg("places"), py::arg("adds"),
             py::arg("weight"), py::arg("out"), py::arg("numel"), py::arg("num_threads"));
  module.def(
      "block_top_k_bytes", [](std::size_t numel, std::size_t kept) { return BlockTopKLayout(numel, kept).nbytes; },
      py::arg("numel"), py::arg("kept"));
  module.def("encode_block_top_k", &encode_block_top_k_at, py::arg("x"), py::arg("type"), py::arg("numel"),
             py::arg("kept"), py::arg("feedback"), py::arg("out"), py::arg("num_threads"));
  module.def("decode_block_top_k", &decode_block_top_k_at, py::arg("payloads"), py::arg("kept"), py::arg("adds"),
             py::arg("weight"), py::arg("out"), py::arg("numel"), py::arg("num_threads"));
  module.def("encode_momentum", &encode_momentum_at, py::arg("gradient"), py::arg("type"), py::arg("numel"),
             py::arg("velocity"), py::arg("places"), py::arg("feedback"), py::arg("out"), py::arg("num_threads"));
  module.def("block_codecs", &block_codecs);
  module.attr("top_k_block") = kTopKBlock;
  module.def("payload_bytes", &payload_bytes, py::arg("codec"), py::arg("numel"));
  module.def("encode", &encode, py::arg("codec"), py::arg("x"), py::arg("type"), py::arg("numel"), py::arg("chunk"),
             py::arg("feedback"), py::arg("random"), py::arg("out"), py::arg("num_threads"));
  module.def("encode_sum", &encode_sum, py::arg("codec"), py::arg("payloads"), py::arg("numel"), py::arg("feedback"),
             py::arg("random"), py::arg("first"), py::arg("out"), py::arg("num_threads"));
  module.def("decode", &decode, py::arg("codec"), py::arg("payloads"), py::arg("numel"), py::arg("chunk"),
             py::arg("out"), py::arg("type"), py::arg("adds"), py::arg("weight"), py::arg("num_threads"));
  module.def("decode_sum", &decode_sum, py::arg("codec"), py::arg("payloads"), py::arg("numel"), py::arg("out"),
             py::arg("type"), py::arg("num_threads"));
}

}  // namespace commlib
