// Prefill: a tile of a sequence's query rows (the heads of a group folded in) and one KV head, with an online softmax
// over tiles of COLUMNS keys. Keys are packed transposed: one register-blocked multiplication does both products.

#pragma once

#include "job.h"

namespace {

constexpr int COLUMNS = 64;  // keys of a tile
constexpr int STEP = 6;      // query rows of a register tile

// c[N, NV * W] += a[N, k] b[k, NV * W], in registers; the arguments' rows are `..._stride` floats apart.
template <int N, int NV>
void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                   int64_t k) {
  vf sum[N][NV];
  UNROLL for (int r = 0; r < N; ++r) {
    UNROLL for (int v = 0; v < NV; ++v) sum[r][v] = load(c + r * c_stride + v * W);
  }
  for (int64_t i = 0; i < k; ++i) {
    vf right[NV];
    UNROLL for (int v = 0; v < NV; ++v) right[v] = load(b + i * b_stride + v * W);
    UNROLL for (int r = 0; r < N; ++r) {
      float left = a[r * a_stride + i];
      UNROLL for (int v = 0; v < NV; ++v) sum[r][v] += right[v] * left;
    }
  }
  UNROLL for (int r = 0; r < N; ++r) {
    UNROLL for (int v = 0; v < NV; ++v) store(c + r * c_stride + v * W, sum[r][v]);
  }
}

// c[rows, columns] += a[rows, k] b[k, columns]; rows a multiple of STEP, columns of W.
void multiply(const float* a, const float* b, float* c, int64_t rows, int64_t columns, int64_t k) {
  int64_t first = 0;
  for (; first + PANEL * W <= columns; first += PANEL * W)
    for (int64_t r = 0; r < rows; r += STEP)
      multiply_tile<STEP, PANEL>(a + r * k, k, b + first, columns, c + r * columns + first, columns, k);
  for (; first < columns; first += W)
    for (int64_t r = 0; r < rows; r += STEP)
      multiply_tile<STEP, 1>(a + r * k, k, b + first, columns, c + r * columns + first, columns, k);
}

struct Tile {
  int64_t rows;                 // tokens * G, padded to STEP
  int64_t low, high;            // positions of its queries
  int64_t* cache_rows;          // [COLUMNS]
  float* query;                 // [rows, D], scaled
  float* keys;                  // [D, COLUMNS]
  float* values;                // [COLUMNS, DV]
  float* scores;                // [rows, COLUMNS], then weights
  float* sums;                  // [rows, DV]
  float *highest, *previous;    // [rows]
  float* total;                 // [rows, W]: a vector of partial sums each
  void *key_rows, *value_rows;  // [COLUMNS, D], [COLUMNS, DV] copies, if there are any

  Tile(Scratch& scratch, const Job& job, int64_t tokens)
      : rows(rounded_up(tokens * job.group, STEP)), low(0), high(0), cache_rows(scratch.take<int64_t>(COLUMNS)),
        query(scratch.take<float>(rows * job.dim)), keys(scratch.take<float>(job.dim * COLUMNS)),
        values(scratch.take<float>(COLUMNS * job.v_dim)), scores(scratch.take<float>(rows * COLUMNS)),
        sums(scratch.take<float>(rows * job.v_dim)), highest(scratch.take<float>(rows)),
        previous(scratch.take<float>(rows)), total(scratch.take<float>(rows * W)),
        key_rows(scratch.take<float>(job.copies ? COLUMNS * job.dim : 0)),
        value_rows(scratch.take<float>(job.copies ? COLUMNS * job.v_dim : 0)) {}
};

INLINE void transpose(vf* x) {  // W x W: log2(W) perfect shuffles
  UNROLL for (int size = 1; size < W; size *= 2) {
    vf y[W];
    UNROLL for (int i = 0; i < W / 2; ++i) {
      y[2 * i] = SHUFFLE(x[i], x[i + W / 2], ZIP_LOW);
      y[2 * i + 1] = SHUFFLE(x[i], x[i + W / 2], ZIP_HIGH);
    }
    UNROLL for (int i = 0; i < W; ++i) x[i] = y[i];
  }
}

// Keys of the cache rows from..to of the tile, transposed; zeros for the others, which nothing may be read of.
template <class T> void pack_keys(Tile& tile, const T* keys, int64_t dim, int64_t from, int64_t to) {
  for (int64_t t = 0; t < COLUMNS; t += W) {
    for (int64_t d = 0; d < dim; d += W) {
      vf x[W];
      UNROLL for (int i = 0; i < W; ++i)
        x[i] = t + i >= from && t + i < to ? load(keys + tile.cache_rows[t + i] * dim + d) : vf{};
      transpose(x);
      UNROLL for (int i = 0; i < W; ++i) store(tile.keys + (d + i) * COLUMNS + t, x[i]);
    }
  }
}

template <class T> void pack_values(Tile& tile, const T* values, int64_t v_dim, int64_t from, int64_t to) {
  for (int64_t t = 0; t < COLUMNS; ++t) {
    float* row = tile.values + t * v_dim;
    if (t < from || t >= to) memset(row, 0, v_dim * sizeof(float));
    else unpack(values + tile.cache_rows[t] * v_dim, v_dim, row, v_dim, 1.0f);
  }
}

template <class T> void pack_tile(const Job& job, Tile& tile, int64_t from, int64_t to) {
  const T *keys = (const T*)job.layer.key_cache, *values = (const T*)job.layer.value_cache;
  if (job.copies) {
    int64_t* rows = tile.cache_rows + from;
    keys = copy_rows(keys, rows, to - from, job.setup.head_dim, job.dim, (T*)tile.key_rows);
    values = copy_rows(values, rows, to - from, job.setup.v_head_dim, job.v_dim, (T*)tile.value_rows);
    for (int64_t t = from; t < to; ++t) tile.cache_rows[t] = t - from;
  }
  pack_keys(tile, keys, job.dim, from, to);
  pack_values(tile, values, job.v_dim, from, to);
}

INLINE int64_t within_tile(int64_t column) { return smaller_of(COLUMNS, larger_of(0, column)); }

// Scores of one row -> capped, hidden ones -inf; returns the highest. Visible are the columns from..to.
float mask_row(const Job& job, float* scores, int64_t from, int64_t to) {
  vf top = splat(LOWEST);
  bool hides = from > 0 || to < COLUMNS;
  vi column;
  for (int i = 0; i < W; ++i) column[i] = i;
  for (int64_t t = 0; t < COLUMNS; t += W) {
    vf score = capped(job, load(scores + t));
    vi visible = (column >= (int32_t)(from - t)) & (column < (int32_t)(to - t));
    if (hides) score = choose(visible, score, splat(-INFINITY));
    if (hides || job.layer.soft_cap > 0) store(scores + t, score);
    top = larger(score, top);
  }
  return largest_of(top);
}

// Highest scores so far, with the tile of keys that starts at position `start`.
void find_highest(const Job& job, Tile& tile, int64_t start) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    int64_t position = tile.low + r / job.group;
    int64_t from = within_tile(job.first_visible(position) - start), to = within_tile(position + 1 - start);
    float top = mask_row(job, tile.scores + r * COLUMNS, from, to);
    tile.previous[r] = tile.highest[r];
    tile.highest[r] = top > tile.highest[r] ? top : tile.highest[r];
  }
}

// Scores -> weights; what was summed before is scaled to the new maximum.
void weigh_tile(const Job& job, Tile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float factor = exponential_of(tile.previous[r] - tile.highest[r]);
    float *scores = tile.scores + r * COLUMNS, *sums = tile.sums + r * job.v_dim;
    vf total = load(tile.total + r * W) * factor;
    for (int64_t t = 0; t < COLUMNS; t += W) {
      vf weight = exponential(load(scores + t) - tile.highest[r]);
      store(scores + t, weight);
      total += weight;
    }
    store(tile.total + r * W, total);
    if (factor != 1.0f)
      for (int64_t d = 0; d < job.v_dim; d += W) store(sums + d, load(sums + d) * factor);
  }
}

template <class T> void load_queries(const Job& job, Tile& tile, int64_t token, int64_t head) {
  const T* query = (const T*)job.layer.query + token * job.layer.query_stride + head * job.group * job.setup.head_dim;
  int64_t used = (tile.high - tile.low) * job.group, dim = job.setup.head_dim;
  for (int64_t r = 0; r < used; ++r) {
    const T* row = query + r / job.group * job.layer.query_stride + r % job.group * dim;
    unpack(row, dim, tile.query + r * job.dim, job.dim, job.layer.scale);
  }
  memset(tile.query + used * job.dim, 0, (tile.rows - used) * job.dim * sizeof(float));
  memset(tile.sums, 0, tile.rows * job.v_dim * sizeof(float));
  memset(tile.total, 0, tile.rows * W * sizeof(float));
  for (int64_t r = 0; r < tile.rows; ++r) tile.highest[r] = LOWEST;
}

template <class T> void prefill(Job& job, int64_t sequence, int64_t task, char* memory) {
  int64_t length = job.query_length(sequence), tokens = job.prefill_tokens(), heads = job.setup.num_kv_heads;
  int64_t head = task % heads, index = (length - 1) / tokens - task / heads;  // the longest first
  int64_t used = smaller_of(tokens, length - index * tokens), past = job.step.seq_lens[sequence] - length;
  int64_t token = job.step.query_start[sequence] + index * tokens;
  Scratch scratch{memory};
  Tile tile(scratch, job, used);
  tile.low = past + index * tokens, tile.high = tile.low + used;
  load_queries<T>(job, tile, token, head);
  int64_t first = job.first_visible(tile.low);
  for (int64_t start = first / COLUMNS * COLUMNS; start < tile.high; start += COLUMNS) {
    int64_t from = larger_of(0, first - start), to = smaller_of(COLUMNS, tile.high - start);
    find_rows(job, sequence, head, start + from, to - from, tile.cache_rows + from);
    pack_tile<T>(job, tile, from, to);
    memset(tile.scores, 0, tile.rows * COLUMNS * sizeof(float));
    multiply(tile.query, tile.keys, tile.scores, tile.rows, COLUMNS, job.dim);
    find_highest(job, tile, start);
    weigh_tile(job, tile);
    multiply(tile.scores, tile.values, tile.sums, tile.rows, job.v_dim, COLUMNS);
  }
  for (int64_t r = 0; r < used * job.group; ++r)
    finish_row<T>(job, token + r / job.group, head * job.group + r % job.group, tile.sums + r * job.v_dim,
                  tile.highest[r], sum_of(load(tile.total + r * W)));
}

}  // namespace
