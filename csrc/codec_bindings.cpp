// For commlib/kernels/native_*.py. Every call checks its tensors and numbers here: types, devices, sizes, overlaps. All
// kernels run without the GIL.
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
#include "codec_arguments.h"
#include "sparse.h"

namespace commlib {
namespace {

constexpr std::size_t kMostSparseElements = 0xFFFFFFFE;  // indices have 32 bits, and one means an unused place

const CodecShape& shape_of(int codec) {
  const CodecShape* shape = find_shape(codec);
  if (shape == nullptr) throw std::invalid_argument("no block codec has the id " + std::to_string(codec));
  return *shape;
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

// Philox's key and counter, and which elements have which global offsets.
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

EncodeJob new_job(const CodecShape& shape, const Feedback& feedback, const RandomSource* source, std::size_t first,
                  std::size_t numel, std::uint8_t* payload) {
  return {nullptr,
          DType::kFloat32,
          nullptr,
          0,
          1.0f,
          feedback.residual,
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

std::size_t bytes_of_chunks(const CodecShape& shape, std::size_t numel, std::size_t chunk) {
  const std::size_t rest = numel % chunk;
  return numel / chunk * Layout(shape, chunk).payload_bytes + Layout(shape, rest).payload_bytes;
}

std::size_t chunk_or_whole(std::optional<std::size_t> chunk, std::size_t numel) {
  if (chunk == std::size_t{0}) refuse();
  return chunk.value_or(std::max<std::size_t>(numel, 1));
}

// Splits `x` into chunks of `chunk` elements. Payload i starts at i times the size of a full one.
void encode(int codec, py::handle x, py::handle out, std::optional<std::size_t> chunk_or_none, py::handle feedback,
            const RandomSource* source, int num_threads) {
  const CodecShape& shape = shape_of(codec);
  const ValuesView values = values_of(x);
  const std::size_t numel = values.count;
  const std::size_t chunk = chunk_or_whole(chunk_or_none, numel);
  const std::size_t nbytes = bytes_of_chunks(shape, numel, chunk);
  std::uint8_t* const payloads = payload_of(out, nbytes);
  check_apart(memory_of(values), {payloads, nbytes});
  const Feedback whole(feedback, numel, memory_of(values), {payloads, nbytes});
  const std::size_t distance = Layout(shape, chunk).payload_bytes;
  const bool is_large = exceeds_cache(numel * element_bytes(values.type));
  // Payloads stream from half the size on, because the tensor passes through the cache as well.
  const bool streams = exceeds_cache((numel + chunk - 1) / chunk * distance * 2);
  const py::gil_scoped_release released;
  for (std::size_t first = 0; first < numel; first += chunk) {
    Feedback own = whole;
    if (own.residual != nullptr) own.residual += first;
    EncodeJob job =
        new_job(shape, own, source, first, std::min(chunk, numel - first), payloads + first / chunk * distance);
    job.x = static_cast<const std::uint8_t*>(values.data) + first * element_bytes(values.type);
    job.type = values.type;
    job.exceeds_cache = is_large;
    job.streams = streams;
    encode_chunk(codec, job, num_threads);
  }
}

// The addresses of the payloads; valid until this thread's next call.
const std::vector<const std::uint8_t*>& rows(const Payloads& payloads) {
  static thread_local std::vector<const std::uint8_t*> pointers;  // keeps its memory between calls
  pointers.resize(payloads.count);
  for (std::size_t i = 0; i < payloads.count; ++i) pointers[i] = payloads.data + i * payloads.nbytes;
  return pointers;
}

// Encodes the sum of payloads; the chunk starts at element `first` of the tensor.
void encode_sum(int codec, py::handle payloads, std::size_t numel, py::handle out, double divisor, py::handle feedback,
                const RandomSource* source, std::size_t first, int num_threads) {
  const CodecShape& shape = shape_of(codec);
  const std::size_t distance = Layout(shape, numel).payload_bytes;
  const Payloads terms(payloads, distance, divisor);
  std::uint8_t* const payload = payload_of(out, distance);
  check_apart(terms.memory(), {payload, distance});
  const Feedback own(feedback, numel, terms.memory(), {payload, distance});
  const auto& inputs = rows(terms);
  const py::gil_scoped_release released;
  EncodeJob job = new_job(shape, own, source, first, numel, payload);
  job.inputs = inputs.data();
  job.num_inputs = terms.count;
  job.divisor = terms.divisor;
  job.streams = exceeds_cache((terms.count + 1) * distance / 2);  // the cache holds at most twice what streams
  encode_chunk(codec, job, num_threads);
}

void decode(int codec, py::handle payload, py::handle out, std::optional<std::size_t> chunk_or_none, bool adds,
            double weight, int num_threads) {
  const CodecShape& shape = shape_of(codec);
  const ValuesView values = values_of(out);
  const std::size_t numel = values.count;
  const std::size_t chunk = chunk_or_whole(chunk_or_none, numel);
  const std::size_t nbytes = bytes_of_chunks(shape, numel, chunk);
  const std::uint8_t* const payloads = payload_of(payload, nbytes);
  check_apart(memory_of(values), {payloads, nbytes});
  const float factor = number(weight);
  const std::size_t distance = Layout(shape, chunk).payload_bytes;
  // Otherwise `out` is in the cache, as it was just read.
  const bool streams = !adds && exceeds_cache(numel * element_bytes(values.type));
  const py::gil_scoped_release released;
  for (std::size_t first = 0; first < numel; first += chunk) {
    const auto* own = payloads + first / chunk * distance;
    const std::size_t count = std::min(chunk, numel - first);
    void* to = static_cast<std::uint8_t*>(values.data) + first * element_bytes(values.type);
    decode_chunk(codec, {&own, 1, 1.0f, adds, factor, to, values.type, count, Layout(shape, count), streams},
                 num_threads);
  }
}

void decode_sum(int codec, py::handle payloads, py::handle out, double divisor, int num_threads) {
  const ValuesView values = values_of(out);
  const Layout layout(shape_of(codec), values.count);
  const Payloads terms(payloads, layout.payload_bytes, divisor);
  check_apart(memory_of(values), terms.memory());
  const auto& inputs = rows(terms);
  const py::gil_scoped_release released;
  decode_chunk(codec,
               {inputs.data(), terms.count, terms.divisor, false, 1.0f, values.data, values.type, values.count, layout,
                exceeds_cache(values.count * element_bytes(values.type))},
               num_threads);
}

// `out` is `x` itself or apart from it.
void rotate(py::handle x, py::handle out, const RandomSource& source, bool is_inverse, int num_threads) {
  TensorView from;
  if (!read_tensor(x.ptr(), DType::kFloat32, &from)) refuse();
  float* const to = state_of(out, from.count);
  const std::size_t nbytes = from.count * sizeof(float);
  if (to != from.data) check_apart({from.data, nbytes}, {to, nbytes});
  const RotateJob job = {static_cast<const float*>(from.data), to, from.count, &source.random, is_inverse};
  const py::gil_scoped_release released;
  rotate_chunk(job, num_threads);
}

// A copy that bypasses the caches, as a reference for benchmarks.
void stream_copy(py::handle dst, py::handle src) {
  ByteView to, from;
  if (!read_bytes(dst.ptr(), &to) || !read_bytes(src.ptr(), &from) || to.nbytes != from.nbytes) refuse();
  check_apart({to.data, to.nbytes}, {from.data, from.nbytes});
  const py::gil_scoped_release released;
  active_kernels().codecs->stream_copy(to.data, from.data, to.nbytes);
}

// The source and the target of a sparse encoding.
struct SparseEncoding {
  SparseSource source;
  std::uint8_t* out;
};

// `nbytes` are those of the payload of the elements of `x`, of which `places` at most are named.
SparseEncoding sparse_encoding(py::handle x, std::size_t places, std::size_t nbytes, py::handle out,
                               py::handle feedback) {
  const ValuesView values = values_of(x);
  if (values.count > kMostSparseElements || places > values.count) refuse();
  std::uint8_t* const payload = payload_of(out, nbytes);
  check_apart(memory_of(values), {payload, nbytes});
  const Feedback own(feedback, values.count, memory_of(values), {payload, nbytes});
  return {{values.data, values.type, own.residual, own.beta, own.gamma, values.count}, payload};
}

// Bytes of a payload. Whether the chunk has so many elements is checked later.
std::size_t bytes_of_places(std::size_t places) {
  if (places > kMostSparseElements) refuse();
  return sparse_payload_bytes(places);
}

void encode_top_k_of(py::handle x, std::size_t places, py::handle out, py::handle feedback, int num_threads) {
  const SparseEncoding job = sparse_encoding(x, places, bytes_of_places(places), out, feedback);
  const py::gil_scoped_release released;
  encode_top_k(job.source, places, job.out, num_threads);
}

void encode_above_of(py::handle x, std::uint32_t threshold_bits, std::size_t places, py::handle out,
                     py::handle feedback, int num_threads) {
  const SparseEncoding job = sparse_encoding(x, places, bytes_of_places(places), out, feedback);
  const py::gil_scoped_release released;
  encode_above(job.source, threshold_bits, places, job.out, num_threads);
}

void encode_random_k_of(py::handle x, std::size_t places, py::handle out, const RandomSource& random,
                        py::handle feedback, int num_threads) {
  const SparseEncoding job = sparse_encoding(x, places, bytes_of_places(places), out, feedback);
  const Random& key = random.random;
  const py::gil_scoped_release released;
  encode_random_k(job.source, key.key, key.step, key.stage_and_rank, places, job.out, num_threads);
}

// Returns -1, or the index of the first invalid payload, in which case nothing was written.
std::int64_t decode_sparse_of(py::handle payloads, std::size_t places, py::handle out, double divisor, bool adds,
                              double weight, int num_threads) {
  TensorView chunk;
  if (!read_tensor(out.ptr(), DType::kFloat32, &chunk)) refuse();
  const Payloads terms(payloads, bytes_of_places(places), divisor);
  check_apart({chunk.data, chunk.count * sizeof(float)}, terms.memory());
  const float factor = number(weight);
  const auto& inputs = rows(terms);
  auto* to = static_cast<float*>(chunk.data);
  const py::gil_scoped_release released;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!sparse_is_valid(inputs[i], places, chunk.count, num_threads)) return static_cast<std::int64_t>(i);
  }
  if (adds) {
    for (const std::uint8_t* input : inputs) add_sparse(input, places, factor, to, chunk.count, num_threads);
  } else {
    sum_sparse(inputs.data(), inputs.size(), places, terms.divisor, to, chunk.count, num_threads);
  }
  return -1;
}

BlockTopKLayout block_top_k_layout(std::size_t numel, std::size_t kept) {
  if (kept == 0 || kept > kTopKBlock) refuse();
  return {numel, kept};
}

void encode_block_top_k_of(py::handle x, std::size_t kept, py::handle out, py::handle feedback, int num_threads) {
  const ValuesView values = values_of(x);
  const BlockTopKLayout layout = block_top_k_layout(values.count, kept);
  std::uint8_t* const payload = payload_of(out, layout.nbytes);
  check_apart(memory_of(values), {payload, layout.nbytes});
  const Feedback own(feedback, values.count, memory_of(values), {payload, layout.nbytes});
  const SparseSource source = {values.data, values.type, own.residual, own.beta, own.gamma, values.count};
  const py::gil_scoped_release released;
  encode_block_top_k(source, layout, payload, num_threads);
}

// Returns the same as decode_sparse_of.
std::int64_t decode_block_top_k_of(py::handle payloads, std::size_t kept, py::handle out, double divisor, bool adds,
                                   double weight, int num_threads) {
  TensorView chunk;
  if (!read_tensor(out.ptr(), DType::kFloat32, &chunk)) refuse();
  const BlockTopKLayout layout = block_top_k_layout(chunk.count, kept);
  const Payloads terms(payloads, layout.nbytes, divisor);
  check_apart({chunk.data, chunk.count * sizeof(float)}, terms.memory());
  const float factor = number(weight);
  const auto& inputs = rows(terms);
  auto* to = static_cast<float*>(chunk.data);
  const py::gil_scoped_release released;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!block_top_k_is_valid(inputs[i], layout, num_threads)) return static_cast<std::int64_t>(i);
  }
  if (adds) {
    for (const std::uint8_t* input : inputs) add_block_top_k(input, layout, factor, to, num_threads);
  } else {
    sum_block_top_k(inputs.data(), inputs.size(), layout, terms.divisor, to, num_threads);
  }
  return -1;
}

// Replaces `velocity` by decay * velocity + factor * gradient and encodes it. Returns whether all of the gradient is
// finite.
bool encode_momentum_of(py::handle gradient, py::handle velocity, double decay, double factor, std::size_t places,
                        py::handle out, py::handle feedback, int num_threads) {
  SparseEncoding job = sparse_encoding(gradient, places, bytes_of_places(places), out, feedback);
  const ValuesView values = values_of(gradient);
  float* const state = state_of(velocity, values.count);
  const Memory own = {state, values.count * sizeof(float)};
  check_apart(own, memory_of(values));
  check_apart(own, {job.out, sparse_payload_bytes(places)});
  if (job.source.residual != nullptr) check_apart(own, {job.source.residual, values.count * sizeof(float)});
  const Momentum momentum = {values.data, values.type, number(decay), number(factor), state};
  job.source.x = state;
  job.source.type = DType::kFloat32;
  const py::gil_scoped_release released;
  return encode_momentum(momentum, job.source, places, job.out, num_threads);
}

}  // namespace

void bind_codecs(py::module_& module) {
  py::class_<RandomSource>(module, "RandomSource")
      .def(py::init<std::uint64_t, std::uint32_t, std::uint32_t,
                    const std::vector<std::pair<std::uint64_t, std::uint64_t>>&>(),
           py::arg("seed"), py::arg("step"), py::arg("stage_and_rank"), py::arg("segments"));
  module.def("stream_copy", &stream_copy, py::arg("dst"), py::arg("src"));
  module.def("rotate", &rotate, py::arg("x"), py::arg("out"), py::arg("random"), py::arg("is_inverse"),
             py::arg("num_threads"));
  module.def("sparse_payload_bytes", &sparse_payload_bytes, py::arg("places"));
  module.def("encode_top_k", &encode_top_k_of, py::arg("x"), py::arg("places"), py::arg("out"), py::arg("feedback"),
             py::arg("num_threads"));
  module.def("encode_above", &encode_above_of, py::arg("x"), py::arg("threshold_bits"), py::arg("places"),
             py::arg("out"), py::arg("feedback"), py::arg("num_threads"));
  module.def("encode_random_k", &encode_random_k_of, py::arg("x"), py::arg("places"), py::arg("out"), py::arg("random"),
             py::arg("feedback"), py::arg("num_threads"));
  module.def("decode_sparse", &decode_sparse_of, py::arg("payloads"), py::arg("places"), py::arg("out"),
             py::arg("divisor"), py::arg("adds"), py::arg("weight"), py::arg("num_threads"));
  module.def(
      "block_top_k_bytes", [](std::size_t numel, std::size_t kept) { return BlockTopKLayout(numel, kept).nbytes; },
      py::arg("numel"), py::arg("kept"));
  module.def("encode_block_top_k", &encode_block_top_k_of, py::arg("x"), py::arg("kept"), py::arg("out"),
             py::arg("feedback"), py::arg("num_threads"));
  module.def("decode_block_top_k", &decode_block_top_k_of, py::arg("payloads"), py::arg("kept"), py::arg("out"),
             py::arg("divisor"), py::arg("adds"), py::arg("weight"), py::arg("num_threads"));
  module.def("encode_momentum", &encode_momentum_of, py::arg("gradient"), py::arg("velocity"), py::arg("decay"),
             py::arg("factor"), py::arg("places"), py::arg("out"), py::arg("feedback"), py::arg("num_threads"));
  module.def("block_codecs", &block_codecs);
  module.attr("top_k_block") = kTopKBlock;
  module.def("payload_bytes", &payload_bytes, py::arg("codec"), py::arg("numel"));
  module.def("encode", &encode, py::arg("codec"), py::arg("x"), py::arg("out"), py::arg("chunk"), py::arg("feedback"),
             py::arg("random"), py::arg("num_threads"));
  module.def("encode_sum", &encode_sum, py::arg("codec"), py::arg("payloads"), py::arg("numel"), py::arg("out"),
             py::arg("divisor"), py::arg("feedback"), py::arg("random"), py::arg("first"), py::arg("num_threads"));
  module.def("decode", &decode, py::arg("codec"), py::arg("payload"), py::arg("out"), py::arg("chunk"), py::arg("adds"),
             py::arg("weight"), py::arg("num_threads"));
  module.def("decode_sum", &decode_sum, py::arg("codec"), py::arg("payloads"), py::arg("out"), py::arg("divisor"),
             py::arg("num_threads"));
}

}  // namespace commlib
