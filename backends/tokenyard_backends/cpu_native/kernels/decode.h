// Decoding: one query row of a sequence, one KV head, one split of CHUNK tokens at fixed positions.

#pragma once

#include "job.h"

namespace {

constexpr int TILE = 16;   // tokens scored together
constexpr int RUN = 32;    // tokens whose values are added together
constexpr int AHEAD = 48;  // tokens between a prefetch and its use: pages are too short for the CPU's own prefetching
constexpr int HEADS = 4;   // query heads that share a pass over keys or values

template <int N> struct Count { static constexpr int value = N; };

template <class F> INLINE void with_heads(int64_t n, F f) {
  switch (n) {
    case 1: return f(Count<1>{});
    case 2: return f(Count<2>{});
    case 3: return f(Count<3>{});
    default: return f(Count<HEADS>{});
  }
}

// Scores of N heads for TILE rows; `scores` is [N, CHUNK]. `ahead`: prefetch the rows that are due AHEAD rows later,
// spread over the work: prefetched in one go they would wait for each other, and the work for them.
template <class T, int N>
void score_tile(const float* query, int64_t dim, const T* const* rows, bool ahead, float* scores) {
  constexpr int SLOTS = W / 4, LINE = 64 / sizeof(T);
  for (int first = 0; first < TILE; first += W) {
    vf folded[N][4];
    for (int g = 0; g < 4; ++g) {
      const T* const* row = rows + first + g;  // slot j of vector g is row 4 * j + g, as sum_lanes wants it
      vf sum[N][SLOTS] = {};
      for (int64_t d = 0; d < dim; d += W) {
        vf key[SLOTS];
        if (ahead && d % LINE == 0) {
          UNROLL for (int j = 0; j < SLOTS; ++j) __builtin_prefetch(row[AHEAD + 4 * j] + d);
        }
        UNROLL for (int j = 0; j < SLOTS; ++j) key[j] = load(row[4 * j] + d);
        UNROLL for (int h = 0; h < N; ++h) {
          vf q = load(query + h * dim + d);
          UNROLL for (int j = 0; j < SLOTS; ++j) sum[h][j] += q * key[j];
        }
      }
      UNROLL for (int h = 0; h < N; ++h) folded[h][g] = fold(sum[h]);
    }
    UNROLL for (int h = 0; h < N; ++h) store(scores + h * CHUNK + first, sum_lanes(folded[h]));
  }
}

// Adds NV vectors of `n` value rows, weighted, to N heads; `weights` is [N, CHUNK], `sums` [N, DV].
template <class T, int N, int NV>
void add_values(const T* values, int64_t v_dim, const int64_t* rows, int64_t n, const float* weights, float* sums) {
  constexpr int LINE = 64 / sizeof(T);
  vf sum[N][NV];
  UNROLL for (int h = 0; h < N; ++h) {
    UNROLL for (int v = 0; v < NV; ++v) sum[h][v] = load(sums + h * v_dim + v * W);
  }
  for (int64_t t = 0; t < n; ++t) {
    const T *row = values + rows[t] * v_dim, *later = values + rows[t + AHEAD] * v_dim;
    vf value[NV];
    UNROLL for (int d = 0; d < NV * W; d += LINE) __builtin_prefetch(later + d);
    UNROLL for (int v = 0; v < NV; ++v) value[v] = load(row + v * W);
    UNROLL for (int h = 0; h < N; ++h) {
      float weight = weights[h * CHUNK + t];
      UNROLL for (int v = 0; v < NV; ++v) sum[h][v] += value[v] * weight;
    }
  }
  UNROLL for (int h = 0; h < N; ++h) {
    UNROLL for (int v = 0; v < NV; ++v) store(sums + h * v_dim + v * W, sum[h][v]);
  }
}

struct Split {  // of one query row and KV head
  int64_t n;                // tokens
  int64_t* rows;            // [n, padded with its last one]: further ones are scored and hidden, or only prefetched
  float* query;             // [G, D], scaled
  float* scores;            // [G, CHUNK], then weights
  float* sums;              // [G, DV]
  float *highest, *total;   // [G]
  void *keys, *values;      // [CHUNK, D], [CHUNK, DV] copies, if there are any

  Split(Scratch& scratch, const Job& job)
      : n(0), rows(scratch.take<int64_t>(CHUNK + AHEAD)), query(scratch.take<float>(job.group * job.dim)),
        scores(scratch.take<float>(job.group * CHUNK)), sums(scratch.take<float>(job.group * job.v_dim)),
        highest(scratch.take<float>(job.group)), total(scratch.take<float>(job.group)),
        keys(scratch.take<float>(job.copies ? CHUNK * job.dim : 0)),
        values(scratch.take<float>(job.copies ? CHUNK * job.v_dim : 0)) {}
};

template <class T> void score_split(const Job& job, Split& split, const T* keys, const T* values) {
  int64_t padded = rounded_up(split.n, TILE);
  const T* rows[CHUNK + AHEAD];  // of keys, then the first ones of values, to be prefetched only
  for (int64_t t = 0; t < padded; ++t) rows[t] = keys + split.rows[t] * job.dim;
  for (int64_t t = 0; t < AHEAD; ++t) rows[padded + t] = values + split.rows[smaller_of(t, split.n - 1)] * job.v_dim;
  for (int64_t t = 0; t < padded; t += TILE) {
    for (int64_t h = 0; h < job.group; h += HEADS) {
      const float* query = split.query + h * job.dim;
      float* scores = split.scores + h * CHUNK + t;
      with_heads(job.group - h, [&](auto n) { score_tile<T, n.value>(query, job.dim, rows + t, h == 0, scores); });
    }
  }
}

void weigh_split(const Job& job, Split& split) {
  int64_t padded = rounded_up(split.n, TILE);
  for (int64_t h = 0; h < job.group; ++h) {
    float* scores = split.scores + h * CHUNK;
    vf top = splat(LOWEST), total = {};
    if (job.layer.soft_cap > 0)
      for (int64_t t = 0; t < padded; t += W) store(scores + t, capped(job, load(scores + t)));
    for (int64_t t = split.n; t < padded; ++t) scores[t] = -INFINITY;
    for (int64_t t = 0; t < padded; t += W) top = larger(load(scores + t), top);
    split.highest[h] = largest_of(top);
    for (int64_t t = 0; t < padded; t += W) {
      vf weight = exponential(load(scores + t) - split.highest[h]);
      store(scores + t, weight);
      total += weight;
    }
    split.total[h] = sum_of(total);
  }
}

template <class T, int N>
void add_run(const T* values, int64_t v_dim, const int64_t* rows, int64_t n, const float* weights, float* sums) {
  int64_t d = 0;
  for (; d + PANEL * W <= v_dim; d += PANEL * W)
    add_values<T, N, PANEL>(values + d, v_dim, rows, n, weights, sums + d);
  for (; d < v_dim; d += W) add_values<T, N, 1>(values + d, v_dim, rows, n, weights, sums + d);
}

template <class T> void sum_split(const Job& job, Split& split, const T* values) {
  memset(split.sums, 0, job.group * job.v_dim * sizeof(float));
  for (int64_t t = 0; t < split.n; t += RUN) {
    int64_t num_rows = smaller_of(RUN, split.n - t);
    for (int64_t h = 0; h < job.group; h += HEADS) {
      const float* weights = split.scores + h * CHUNK + t;
      float* sums = split.sums + h * job.v_dim;
      with_heads(job.group - h, [&](auto n) {
        add_run<T, n.value>(values, job.v_dim, split.rows + t, num_rows, weights, sums);
      });
    }
  }
}

// Partial results of all splits -> one, in order, by whoever finished last.
void merge_splits(const Job& job, Split& split, const float* partials, int64_t num_splits) {
  int64_t size = job.v_dim + 2, stride = job.setup.num_kv_heads * job.group * size;
  for (int64_t h = 0; h < job.group; ++h) {
    float top = LOWEST, total = 0;
    float* sums = split.sums + h * job.v_dim;
    for (int64_t s = 0; s < num_splits; ++s) {
      float highest = partials[s * stride + h * size];
      top = highest > top ? highest : top;
    }
    memset(sums, 0, job.v_dim * sizeof(float));
    for (int64_t s = 0; s < num_splits; ++s) {
      const float* partial = partials + s * stride + h * size;
      float factor = exponential_of(partial[0] - top);
      total += partial[1] * factor;
      for (int64_t d = 0; d < job.v_dim; d += W) store(sums + d, load(sums + d) + load(partial + 2 + d) * factor);
    }
    split.highest[h] = top, split.total[h] = total;
  }
}

void keep_partial(const Job& job, const Split& split, float* partial) {
  for (int64_t h = 0; h < job.group; ++h, partial += job.v_dim + 2) {
    partial[0] = split.highest[h], partial[1] = split.total[h];
    memcpy(partial + 2, split.sums + h * job.v_dim, job.v_dim * sizeof(float));
  }
}

int64_t num_splits(const Job& job, int64_t length) {
  return (length - 1) / CHUNK - job.first_visible(length - 1) / CHUNK + 1;
}

// The queries and rows of split `index` of a sequence; its bounds are multiples of CHUNK, cut by length and window.
template <class T> void load_split(Job& job, Split& split, int64_t sequence, int64_t head, int64_t index) {
  int64_t length = job.step.seq_lens[sequence], first = job.first_visible(length - 1), dim = job.setup.head_dim;
  int64_t chunk = first / CHUNK + index, low = larger_of(first, chunk * CHUNK);
  split.n = smaller_of(length, (chunk + 1) * CHUNK) - low;
  find_rows(job, sequence, head, low, split.n, split.rows);
  const T* query = (const T*)job.layer.query + job.step.query_start[sequence] * job.layer.query_stride;
  for (int64_t h = 0; h < job.group; ++h)
    unpack(query + (head * job.group + h) * dim, dim, split.query + h * job.dim, job.dim, job.layer.scale);
}

template <class T> void decode(Job& job, int64_t sequence, int64_t task, char* memory) {
  Scratch scratch{memory};
  Split split(scratch, job);
  int64_t heads = job.setup.num_kv_heads, head = task % heads, index = task / heads;
  int64_t splits = num_splits(job, job.step.seq_lens[sequence]), token = job.step.query_start[sequence];
  const T *keys = (const T*)job.layer.key_cache, *values = (const T*)job.layer.value_cache;
  load_split<T>(job, split, sequence, head, index);
  if (job.copies) {
    keys = copy_rows(keys, split.rows, split.n, job.setup.head_dim, job.dim, (T*)split.keys);
    values = copy_rows(values, split.rows, split.n, job.setup.v_head_dim, job.v_dim, (T*)split.values);
    for (int64_t t = 0; t < split.n; ++t) split.rows[t] = t;
  }
  for (int64_t t = split.n; t < rounded_up(split.n, TILE) + AHEAD; ++t) split.rows[t] = split.rows[split.n - 1];
  score_split(job, split, keys, values);
  weigh_split(job, split);
  sum_split(job, split, values);
  if (splits > 1) {
    int64_t size = job.group * (job.v_dim + 2);  // floats of a split and KV head
    float* partials = job.step.partials + (job.step.first_split[sequence] * heads + head) * size;
    keep_partial(job, split, partials + index * heads * size);
    if (__atomic_add_fetch(job.step.finished + sequence * heads + head, 1, __ATOMIC_ACQ_REL) < splits) return;
    merge_splits(job, split, partials, splits);
  }
  for (int64_t h = 0; h < job.group; ++h)
    finish_row<T>(job, token, head * job.group + h, split.sums + h * job.v_dim, split.highest[h], split.total[h]);
}

}  // namespace
