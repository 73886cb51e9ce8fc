// An EAGLE-3 draft in one call: settled rows through the drafting layer, then a chain of its likeliest tokens, on the calling thread.
//
// The layer is small (a few MB) and stays in the last-level cache between passes, so a second thread would save less than the target's
// team costs to wake. karui/inference/speculative/eagle3.py is the same computation in torch, with the paper's formulas.
//
// Shapes: n settled rows, P rows in the layer's own KV before them, H hidden, A inputs of the fusion, D draft vocabulary.
#include <algorithm>

#include "ops.h"

struct Drafter {  // mirrored in karui/kernels/native/draft.py
    int32_t hidden, heads, kv_heads, head_dim, intermediate, aux;
    float eps;
    int32_t padding;
    Linear fc, q, k, v, o, gate, up, down, head;
    const float *inv_freq, *embedding_norm, *stream_norm, *post_norm, *final_norm;
    const int64_t* ids;  // [D] the target's ids
};
struct Draft {
    int32_t rows, past, depth, top;
    const int32_t *tokens, *positions;  // [n] the token behind each row, and the row's position
    const float* aux;                   // [n, A]
    float *keys, *values;               // [P + n + depth - 1, kv_heads * head_dim]; rows from P on are written here
    int32_t* out_tokens;                // [depth, top] the likeliest of each depth, along the chain of the likeliest
    float* out_log_probs;               // [depth, top]
};

namespace {

struct Buffers {
    std::vector<float> stream, input, q, mixed, scores, inner, up, normed, logits;
    Work work;
};

// One query head over `count` rows of keys and values; head_dim up to 512.
void attend(const float* query, const float* keys, const float* values, int count, int stride, int dim, float* scores, float* out) {
    float largest = -INFINITY, sum = 0;
    for (int j = 0; j < count; j++) {
        const float* key = keys + (int64_t)j * stride;
        V s = set1(0.0f);
        int d = 0;
        for (; d + W <= dim; d += W) s = fma(load(query + d), load(key + d), s);
        float total = hsum(s);
        for (; d < dim; d++) total += query[d] * key[d];
        scores[j] = total;
        largest = std::max(largest, total);
    }
    int j = 0;
    for (; j + W <= count; j += W) store(scores + j, vexp(sub(load(scores + j), set1(largest))));
    for (; j < count; j++) scores[j] = exp1(scores[j] - largest);
    for (j = 0; j < count; j++) sum += scores[j];
    std::fill(out, out + dim, 0.0f);
    for (j = 0; j < count; j++) {
        const float p = scores[j] / sum;
        const float* value = values + (int64_t)j * stride;
        for (int d = 0; d < dim; d++) out[d] += p * value[d];
    }
}

// One pass: `rows` streams in b.stream become the layer's outputs, in place; their keys and values go to row `at` of the KV on.
void pass(const Drafter& m, const Linear& embedding, const Draft& d, const int32_t* tokens, const int32_t* positions, int rows, int at,
          Buffers& b) {
    const int hidden = m.hidden, hd = m.head_dim, all = m.heads * hd, kv = m.kv_heads * hd, group = m.heads / m.kv_heads;
    b.input.resize((size_t)rows * 2 * hidden);
    b.q.resize((size_t)rows * all);
    b.mixed.resize((size_t)rows * all);
    b.scores.resize(at + rows + W);
    b.inner.resize((size_t)rows * m.intermediate);
    b.up.resize((size_t)rows * m.intermediate);
    b.normed.resize((size_t)std::max(rows, 1) * hidden);
    for (int r = 0; r < rows; r++) {
        float* x = b.input.data() + (int64_t)r * 2 * hidden;
        decode_row(embedding, tokens[r], b.normed.data());
        rms_norm(b.normed.data(), m.embedding_norm, hidden, m.eps, x);
        rms_norm(b.stream.data() + (int64_t)r * hidden, m.stream_norm, hidden, m.eps, x + hidden);
    }
    float *keys = d.keys + (int64_t)at * kv, *values = d.values + (int64_t)at * kv;
    product(m.q, b.input.data(), 2 * hidden, rows, b.q.data(), all, false, b.work);
    product(m.k, b.input.data(), 2 * hidden, rows, keys, kv, false, b.work);
    product(m.v, b.input.data(), 2 * hidden, rows, values, kv, false, b.work);
    const float scale = 1.0f / sqrtf((float)hd);
    float cosine[256], sine[256];
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < hd / 2; i++) {
            const float angle = (float)positions[r] * m.inv_freq[i];
            cosine[i] = cosf(angle);
            sine[i] = sinf(angle);
        }
        for (int h = 0; h < m.heads; h++) rotate(b.q.data() + (int64_t)r * all + h * hd, cosine, sine, hd, scale);
        for (int h = 0; h < m.kv_heads; h++) rotate(keys + (int64_t)r * kv + h * hd, cosine, sine, hd, 1.0f);
    }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < m.heads; h++)
            attend(b.q.data() + (int64_t)r * all + h * hd, d.keys + h / group * hd, d.values + h / group * hd, at + r + 1, kv, hd,
                   b.scores.data(), b.mixed.data() + (int64_t)r * all + h * hd);
    product(m.o, b.mixed.data(), all, rows, b.stream.data(), hidden, true, b.work);
    for (int r = 0; r < rows; r++)
        rms_norm(b.stream.data() + (int64_t)r * hidden, m.post_norm, hidden, m.eps, b.normed.data() + (int64_t)r * hidden);
    product(m.gate, b.normed.data(), hidden, rows, b.inner.data(), m.intermediate, false, b.work);
    product(m.up, b.normed.data(), hidden, rows, b.up.data(), m.intermediate, false, b.work);
    swiglu(b.inner.data(), b.up.data(), rows * m.intermediate, b.inner.data());
    product(m.down, b.inner.data(), m.intermediate, rows, b.stream.data(), hidden, true, b.work);
}

// The `top` likeliest draft tokens behind stream a and their log-probabilities, largest first, the lower id first among equals.
void likeliest(const Drafter& m, const float* a, int top, int32_t* tokens, float* log_probs, Buffers& b) {
    const int n = m.head.n;
    b.logits.resize(round_up(n, W));
    rms_norm(a, m.final_norm, m.hidden, m.eps, b.normed.data());
    product(m.head, b.normed.data(), m.hidden, 1, b.logits.data(), n, false, b.work);
    std::fill(b.logits.begin() + n, b.logits.end(), -INFINITY);
    int held = 0;
    for (int i = 0; i < n; i++) {
        const float value = b.logits[i];
        if (held == top && !(value > log_probs[top - 1])) continue;
        int j = held < top ? held++ : top - 1;
        for (; j > 0 && log_probs[j - 1] < value; j--) { log_probs[j] = log_probs[j - 1]; tokens[j] = tokens[j - 1]; }
        log_probs[j] = value;
        tokens[j] = i;
    }
    const V largest = set1(log_probs[0]);
    V sum = set1(0.0f);
    for (int i = 0; i < (int)b.logits.size(); i += W) sum = add(sum, vexp(sub(load(&b.logits[i]), largest)));
    const float normalizer = log_probs[0] + logf(hsum(sum));
    for (int j = 0; j < top; j++) { log_probs[j] -= normalizer; tokens[j] = (int32_t)m.ids[tokens[j]]; }
}

}  // namespace

extern "C" {

int karui_draft_sizes(int which) { return which ? (int)sizeof(Draft) : (int)sizeof(Drafter); }

void karui_draft(const Drafter* drafter, const Linear* embedding, const Draft* draft) {
    static thread_local Buffers b;
    const Drafter& m = *drafter;
    const Draft& d = *draft;
    b.stream.resize((size_t)d.rows * m.hidden);
    product(m.fc, d.aux, m.aux, d.rows, b.stream.data(), m.hidden, false, b.work);
    pass(m, *embedding, d, d.tokens, d.positions, d.rows, d.past, b);
    std::copy(b.stream.end() - m.hidden, b.stream.end(), b.stream.begin());  // from here on one row
    for (int i = 0;; i++) {
        likeliest(m, b.stream.data(), d.top, d.out_tokens + i * d.top, d.out_log_probs + i * d.top, b);
        if (i + 1 == d.depth) break;
        const int32_t position = d.positions[d.rows - 1] + i + 1;
        pass(m, *embedding, d, d.out_tokens + i * d.top, &position, 1, d.past + d.rows + i, b);
    }
}
}
