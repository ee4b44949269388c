// Paged attention on a CPU behind a plain C ABI: K/V write, decoding with KV splits, chunked prefill.
//
// Everything is computed in float32; the caches and the tensors are float32, bfloat16 or float16. There is no OpenMP in
// here: tasks run on the thread pool that torch uses already, through a function pointer. A task depends on its own
// sequence alone (its splits and tiles lie at fixed token positions, splits are merged in order), so neither the batch
// nor the number of threads changes a bit of a result.
//
// The layout of the caches is [blocks, HK, block size, head size]; a "row" is one token's vector of one KV head.
//
// Legend: H / HK = query / KV heads, G = H / HK, D / DV = head size of keys / values, rounded up to ROW elements.

#include "decode.h"
#include "prefill.h"

namespace {

// Tasks are numbered sequence by sequence, in `order`.
template <class T> void attend(Job& job, int64_t task, char* scratch) {
  const int64_t* first = job.step.first_task;
  int64_t low = 0, high = job.step.num_sequences;  // the last entry of `first` that is <= task
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    (first[middle] <= task ? low : high) = middle;
  }
  int64_t sequence = job.step.order[low];
  if (job.query_length(sequence) == 1) decode<T>(job, sequence, task - first[low], scratch);
  else prefill<T>(job, sequence, task - first[low], scratch);
}

template <class T, void (*RUN_TASK)(Job&, int64_t, char*)> void work(void* data) {
  Job& job = *(Job*)data;
  int32_t thread = __atomic_fetch_add(&job.num_entered, 1, __ATOMIC_RELAXED);
  char* scratch = job.setup.scratch + thread * job.setup.scratch_bytes;
  for (;;) {
    int64_t task = __atomic_fetch_add(&job.next_task, 1, __ATOMIC_RELAXED);
    if (task >= job.num_tasks) return;
    RUN_TASK(job, task, scratch);
  }
}

void run(Job& job, Work work, int64_t num_tasks, double operations) {
  constexpr double WORTH_SHARING = 1 << 18;  // about 10 us on one thread
  job.num_tasks = num_tasks, job.next_task = 0, job.num_entered = 0;
  if (job.setup.parallel && job.setup.num_threads > 1 && num_tasks > 1 && operations > WORTH_SHARING)
    job.setup.parallel(work, &job, (unsigned)job.setup.num_threads, 0);
  else work(&job);
}

template <class T> int32_t run_layer(const Setup& setup, const Step& step, const Layer& layer) {
  Job job(setup, step, layer);
  double row = (double)setup.num_kv_heads * (job.dim + job.v_dim), operations = 0;
  run(job, work<T, write_token<T>>, step.num_tokens, step.num_tokens * row);
  if (job.error) return job.error;
  int64_t num_tasks = 0;
  for (int64_t i = 0; i < step.num_sequences; ++i) {
    int64_t sequence = step.order[i], queries = job.query_length(sequence), length = step.seq_lens[sequence];
    step.first_task[i] = num_tasks;
    num_tasks += setup.num_kv_heads * (queries == 1 ? num_splits(job, length)
                                                    : (queries + job.prefill_tokens() - 1) / job.prefill_tokens());
    operations += row * job.group * queries * (layer.window ? smaller_of(layer.window, length) : length);
  }
  step.first_task[step.num_sequences] = num_tasks;
  memset(step.finished, 0, step.num_sequences * setup.num_kv_heads * sizeof(int32_t));
  run(job, work<T, attend<T>>, num_tasks, operations);
  return job.error;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The vector instructions that this file was compiled for.
EXPORT const char* tokenyard_isa() { return ISA; }

// Tokens of a KV split: `partials` has room for ceil(length / this) splits of each sequence that decodes.
EXPORT int64_t tokenyard_split_tokens() { return CHUNK; }

// Rows are padded to a multiple of this: `partials` has DV rounded up to it.
EXPORT int64_t tokenyard_row_elements() { return ROW; }

// Work space of a thread, in bytes.
EXPORT int64_t tokenyard_scratch_bytes(const Setup* setup) {
  Step step{};
  Layer layer{};
  Job job(*setup, step, layer);
  Scratch decoding{nullptr}, prefilling{nullptr};
  Split split(decoding, job);
  Tile tile(prefilling, job, job.prefill_tokens());
  return larger_of((int64_t)decoding.at, (int64_t)prefilling.at);
}

// One layer of one step: writes K and V, then attends. Returns 0; 1 / 2 if a slot / a block is outside of the cache.
EXPORT int32_t tokenyard_attend(const Setup* setup, const Step* step, const Layer* layer) {
  switch (setup->element_type) {
    case 0: return run_layer<float>(*setup, *step, *layer);
    case 1: return run_layer<Bf16>(*setup, *step, *layer);
    default: return run_layer<Half>(*setup, *step, *layer);
  }
}

// For tests of the arithmetic: in place, n a multiple of 16.
EXPORT void tokenyard_exp(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(x + i, exponential(load(x + i)));
}
EXPORT void tokenyard_tanh(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(x + i, hyperbolic_tangent(load(x + i)));
}
EXPORT void tokenyard_round_trip(float* x, int64_t n, int64_t element_type) {
  for (int64_t i = 0; i < n; i += W) {
    Bf16 brain[W];
    Half half[W];
    if (element_type == 1) store(brain, load(x + i)), store(x + i, load(brain));
    else store(half, load(x + i)), store(x + i, load(half));
  }
}
