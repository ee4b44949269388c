// What a call of the library has to do, and what its kinds of work share.

#pragma once

#include "vectors.h"

namespace {

constexpr int ROW = 16;           // elements: rows of another size are copied and padded before use
constexpr int CHUNK = 256;        // tokens of a KV split in decoding
constexpr int64_t ROWS = 96;      // query rows of a prefill tile, heads of a group folded in; or one token's if more
constexpr float LOWEST = -3e38f;  // a maximum before anything was seen: finite, so that no difference is NaN

typedef void (*Work)(void*);
typedef void (*Parallel)(Work, void*, unsigned num_threads, unsigned flags);  // GOMP_parallel

}  // namespace

extern "C" {

struct Setup {  // of a backend
  int64_t num_heads, num_kv_heads, head_dim, v_head_dim, block_size;
  int64_t element_type;  // 0 float32, 1 bfloat16, 2 float16
  int64_t num_threads;
  Parallel parallel;  // null: everything runs on the calling thread
  char* scratch;      // num_threads * scratch_bytes
  int64_t scratch_bytes;
};

struct Step {  // of one KV group; N = sequences, T = tokens
  int64_t num_sequences, num_tokens, table_stride;
  const int32_t *query_start, *seq_lens;  // [N + 1], [N]
  const int32_t* block_table;             // [N, table_stride]
  const int64_t* slots;                   // [T]
  const int32_t* order;                   // [N] sequences, those with the longest tasks first
  const int64_t* first_split;             // [N] into `partials`, in splits
  int64_t* first_task;                    // [N + 1] work space
  int32_t* finished;                      // [N, HK] work space
  float* partials;                        // [splits, HK, G, DV + 2] work space
};

struct Layer {
  const void *query, *key, *value;  // rows of elements, one token every `..._stride` elements
  void *key_cache, *value_cache, *out;
  float* lse;          // null: not wanted
  const float* sinks;  // null: none
  int64_t query_stride, key_stride, value_stride, num_blocks;
  int64_t window;         // 0: none
  float scale, soft_cap;  // cap 0: none
};

}  // extern "C"

namespace {

INLINE bool copies_rows(const Setup& setup) { return setup.head_dim % ROW || setup.v_head_dim % ROW; }

struct Job {
  const Setup& setup;
  const Step& step;
  const Layer& layer;
  int64_t group, dim, v_dim;  // G, D, DV
  bool copies;                // rows of the caches are shorter than D or DV
  int64_t num_tasks = 0;
  int64_t next_task = 0;
  int32_t num_entered = 0;
  int32_t error = 0;  // 0 none, 1 a slot, 2 a block lies outside of the cache

  Job(const Setup& setup, const Step& step, const Layer& layer)
      : setup(setup), step(step), layer(layer), group(setup.num_heads / setup.num_kv_heads),
        dim(rounded_up(setup.head_dim, ROW)), v_dim(rounded_up(setup.v_head_dim, ROW)), copies(copies_rows(setup)) {}

  int64_t first_visible(int64_t position) const {
    return layer.window ? larger_of(0, position - layer.window + 1) : 0;
  }
  int64_t query_length(int64_t sequence) const { return step.query_start[sequence + 1] - step.query_start[sequence]; }
  void fail(int32_t why) { __atomic_store_n(&error, why, __ATOMIC_RELAXED); }  // by any thread
  int64_t prefill_tokens() const { return larger_of(1, ROWS / group); }  // of a tile
};

struct Scratch {  // hands out aligned pieces of a thread's memory; with null it only counts
  char* at;
  template <class T> T* take(int64_t n) {
    T* piece = (T*)at;
    at += rounded_up(n * sizeof(T), 64);
    return piece;
  }
};

// Cache rows of `n` positions from `first` on. Blocks before the window may be gone: their ids are never read.
void find_rows(Job& job, int64_t sequence, int64_t head, int64_t first, int64_t n, int64_t* rows) {
  int64_t size = job.setup.block_size;
  for (int64_t i = 0; i < n;) {
    int64_t offset = (first + i) % size;
    int64_t block = job.step.block_table[sequence * job.step.table_stride + (first + i) / size];
    if (block < 0 || block >= job.layer.num_blocks) job.fail(2), block = 0;
    int64_t row = (block * job.setup.num_kv_heads + head) * size + offset;
    for (int64_t end = smaller_of(n, i + size - offset); i < end; ++i) rows[i] = row++;
  }
}

// Copies of `n` cache rows, [n, padded] with zeros behind their `size` elements.
template <class T>
const T* copy_rows(const T* cache, const int64_t* rows, int64_t n, int64_t size, int64_t padded, T* copies) {
  for (int64_t i = 0; i < n; ++i) {
    memcpy(copies + i * padded, cache + rows[i] * size, size * sizeof(T));
    memset(copies + i * padded + size, 0, (padded - size) * sizeof(T));
  }
  return copies;
}

// ---- K/V write ----

// `n` elements of each head of one token's K or V.
template <class T> void write_rows(const Job& job, const T* from, int64_t token, int64_t n, T* cache) {
  int64_t slot = job.step.slots[token], size = job.setup.block_size, heads = job.setup.num_kv_heads;
  for (int64_t head = 0; head < heads; ++head)
    memcpy(cache + ((slot / size * heads + head) * size + slot % size) * n, from + head * n, n * sizeof(T));
}

template <class T> void write_token(Job& job, int64_t token, char*) {
  const Layer& layer = job.layer;
  int64_t slot = job.step.slots[token];
  if (slot < 0 || slot >= layer.num_blocks * job.setup.block_size) { job.fail(1); return; }
  const T* key = (const T*)layer.key + token * layer.key_stride;
  const T* value = (const T*)layer.value + token * layer.value_stride;
  write_rows(job, key, token, job.setup.head_dim, (T*)layer.key_cache);
  write_rows(job, value, token, job.setup.v_head_dim, (T*)layer.value_cache);
}

// ---- the end of a row ----

// Writes one row of `out` and `lse` from values weighted with e^(score - highest), and the sum of the weights.
template <class T>
void finish_row(const Job& job, int64_t token, int64_t head, const float* values, float highest, float total) {
  int64_t row = token * job.setup.num_heads + head;
  float factor = 1.0f;
  if (job.layer.sinks) {
    float sink = job.layer.sinks[head], top = sink > highest ? sink : highest;
    factor = exponential_of(highest - top);
    total = total * factor + exponential_of(sink - top);
    highest = top;
  }
  pack(values, job.setup.v_head_dim, (T*)job.layer.out + row * job.setup.v_head_dim, factor / total);
  if (job.layer.lse) job.layer.lse[row] = highest + std::log(total);
}

INLINE vf capped(const Job& job, vf score) {
  float cap = job.layer.soft_cap;
  return cap > 0 ? hyperbolic_tangent(score / cap) * cap : score;
}

}  // namespace
