// Greedy decoding of several sequences for several rounds without coming back: draft, verify all drafts in one step, keep what the model
// would have said. What comes out is what plain greedy decoding says, token for token; a round without drafts is a plain step.
#pragma once
#include <time.h>

#include "medusa.h"

enum Method : int32_t { PLAIN = 0, LOOKUP = 1, EAGLE3 = 2, MEDUSA = 3 };

struct Stream {  // one sequence; mirrored in library.py, as is Rounds
    int32_t length;               // its tokens; the keys of all but the last are in the cache
    int32_t known;                // so many of them, the last ones, are in `tokens`
    int32_t left, reach;          // tokens it may gain; tokens that its blocks hold
    int32_t ends_n, pending, settled, padding;
    const int32_t* ends;          // tokens that end it
    int32_t* tokens;              // with room for what it gains
    // EAGLE3: `pending` rows that the drafting layer has not seen, and that layer's keys of `settled` rows. MEDUSA: aux is the hidden state that
    // gave the last token, pending 1, or 0 where it is not known.
    float *aux, *keys, *values;
    int32_t *after, *positions;   // of the pending rows: the token behind each, and where it stands
};
struct Rounds {
    int32_t sequences, table_width, block_size, aux_n;
    int32_t method, most, gain;   // at most `most` rounds; none starts once a sequence has gained `gain` tokens or has come to its end
    int32_t adapt;                // 1: of a draft only as much is verified as is worth it
    int32_t nodes, depth, width, n_min, n_max;
    float least;
    const int32_t *block_tables, *adapters, *aux_layers;  // as in Batch
    const Drafter* drafter;
    const Medusa* medusa;
    float* odds;                  // LOOKUP: [2, ODDS] accepted and all drafted tokens, by the length of the match that they continue
    Stream* streams;              // [sequences]
    int32_t *depths, *accepted;   // [most, sequences] of each round's drafts, depth 0 for none
    double* seconds;              // [most] of each round
};

constexpr int ODDS = 6;
constexpr double ODDS_KEPT = 0.95;  // of what was seen before, with each token more
static inline int odds_of(int match) {
    int k = 0;
    while (k + 1 < ODDS && match >> (k + 1)) k++;
    return k;
}

// What the calling thread has computed, waiting for its team included: other programs on its core do not count.
static double thread_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

class Deciding {  // the rounds of one call
public:
    Deciding(Model& model, const Rounds& rounds) : m_(model), r_(rounds), drafts_(rounds.sequences) {}

    // Rounds done: fewer than could be where a row holds a NaN, that round being for the caller to look at, or minus an error of step().
    int run() {
        std::vector<int32_t> ends(r_.sequences);
        for (int s = 0; s < r_.sequences; s++) ends[s] = r_.streams[s].length + r_.gain;
        for (int round = 0; round < r_.most; round++) {
            const auto begin = std::chrono::steady_clock::now();
            for (int s = 0; s < r_.sequences; s++) propose(r_.streams[s], drafts_[s]);
            const double drafted = thread_seconds();
            if (const int error = verify()) return -error;
            const double verified = thread_seconds();
            for (int32_t token : best_) if (token < 0) return round;
            bool over = false;
            for (int s = 0; s < r_.sequences; s++) over |= settle(s, round) || r_.streams[s].length >= ends[s];
            m_.costs.saw((int)best_.size(), verified - drafted);
            r_.seconds[round] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            if (over) return round + 1;
        }
        return r_.most;
    }

private:
    struct Nodes {  // one sequence's draft
        int count = 0, match = 0;
        std::vector<int32_t> tokens, parents, depths;
        std::vector<float> log_probs;
        std::vector<uint8_t> mask;  // empty for a chain
    };

    void propose(Stream& x, Nodes& d) {
        const int nodes = std::min(r_.nodes, x.reach - x.length), depth = std::min(r_.depth, x.left - 1);
        d.count = d.match = 0;
        if (nodes < 1 || depth < 1) return;
        for (auto* v : {&d.tokens, &d.parents, &d.depths}) v->resize(nodes);
        if (r_.method == LOOKUP) look_up(x, std::min(nodes, depth), d);
        else if (r_.method == EAGLE3 && x.pending) {
            d.log_probs.resize(nodes);
            const Draft draft = {x.pending, x.settled, depth, r_.width, nodes, r_.least, x.after, x.positions, x.aux, x.keys, x.values,
                                 d.tokens.data(), d.parents.data(), d.log_probs.data()};
            d.count = m_.drafting.run(m_.team, *r_.drafter, *m_.c.embedding, draft, r_.adapt ? &m_.costs : nullptr, r_.sequences);
            x.settled += x.pending;
            x.pending = 0;
        } else if (r_.method == MEDUSA && x.pending) {
            d.log_probs.resize(nodes);
            const Draft draft = {1, 0, depth, r_.width, nodes, r_.least, nullptr, nullptr, x.aux, nullptr, nullptr,
                                 d.tokens.data(), d.parents.data(), d.log_probs.data()};
            d.count = m_.medusa.run(m_.team, *r_.medusa, *m_.c.head, draft, r_.adapt ? &m_.costs : nullptr, r_.sequences);
            x.pending = 0;
        }
        bool chain = true;
        for (int i = 0; i < d.count; i++) {
            d.depths[i] = d.parents[i] < 0 ? 1 : d.depths[d.parents[i]] + 1;
            chain &= d.parents[i] == i - 1;
        }
        const int q = 1 + d.count;
        d.mask.assign(chain ? 0 : q * q, 0);
        for (int i = 0; i < q && !chain; i++) {  // a row sees itself and what its parent sees
            if (i) std::copy_n(&d.mask[(d.parents[i - 1] + 1) * q], q, &d.mask[i * q]);
            d.mask[i * q + i] = 1;
        }
    }

    // Prompt lookup as karui/inference/speculative/ngram.py has it: what followed the longest match of the last n_min to n_max tokens, the
    // latest among equals.
    void look_up(const Stream& x, int most, Nodes& d) {
        const int32_t* t = x.tokens;
        const int n = x.known;
        int behind = 0;
        for (int end = n - 1; end > 0 && d.match < r_.n_max; end--) {
            const int longest = std::min(r_.n_max, end);
            int m = 0;
            while (m < longest && t[end - 1 - m] == t[n - 1 - m]) m++;
            if (m > d.match) { d.match = m; behind = end; }
        }
        if (d.match < r_.n_min) return;
        while (d.match < 1 << ODDS && d.match < behind && t[behind - 1 - d.match] == t[n - 1 - d.match]) d.match++;
        chances_.clear();
        float chance = 1;
        for (int i = 0; i < most; i++) {
            d.tokens[i] = behind + i < n ? t[behind + i] : d.tokens[behind + i - n];
            d.parents[i] = i - 1;
            const float* odds = r_.odds + odds_of(d.match + i);
            chances_.push_back(chance *= odds[0] / odds[ODDS]);
        }
        d.count = r_.adapt ? worth(chances_, m_.costs, r_.sequences) : most;
    }

    int slot(int group, int s, int index) const {
        const int32_t* blocks = r_.block_tables + ((int64_t)group * r_.sequences + s) * r_.table_width;
        return blocks[index / r_.block_size] * r_.block_size + index % r_.block_size;
    }

    int verify() {
        for (auto* v : {&tokens_, &positions_, &slots_, &starts_, &lens_, &rows_}) v->clear();
        masks_.clear();
        bool trees = false;
        for (int s = 0; s < r_.sequences; s++) {
            const Stream& x = r_.streams[s];
            const Nodes& d = drafts_[s];
            starts_.push_back((int)tokens_.size());
            for (int i = 0; i <= d.count; i++) {
                tokens_.push_back(i ? d.tokens[i - 1] : x.tokens[x.known - 1]);
                positions_.push_back(x.length - 1 + (i ? d.depths[i - 1] : 0));
                rows_.push_back((int)rows_.size());
            }
            lens_.push_back(x.length + d.count);
            masks_.push_back(d.mask.empty() ? nullptr : d.mask.data());
            trees |= !d.mask.empty();
        }
        const int total = (int)tokens_.size();
        starts_.push_back(total);
        for (int g = 0; g < m_.groups; g++)
            for (int s = 0; s < r_.sequences; s++)
                for (int i = 0; i <= drafts_[s].count; i++) slots_.push_back(slot(g, s, r_.streams[s].length - 1 + i));
        best_.resize(total);
        const Batch b = {total, r_.sequences, r_.table_width, total, r_.aux_n, r_.block_size, m_.groups, 0, tokens_.data(), positions_.data(), slots_.data(),
                         starts_.data(), lens_.data(), r_.block_tables, rows_.data(), trees ? masks_.data() : nullptr, r_.adapters,
                         r_.aux_layers, nullptr, nullptr, m_.logits.need((size_t)total * m_.c.vocab),
                         r_.method == MEDUSA ? m_.hidden.need((size_t)total * m_.c.hidden) : nullptr,
                         m_.aux.need((size_t)total * r_.aux_n * m_.c.hidden)};
        return step(m_, b, best_.data());
    }

    // Takes the accepted path and one token more; whether the sequence has come to its end.
    bool settle(int s, int round) {
        Stream& x = r_.streams[s];
        Nodes& d = drafts_[s];
        const int first = starts_[s], at = round * r_.sequences + s, aux = r_.aux_n * m_.c.hidden;
        std::vector<int32_t> taken = {0};  // rows whose tokens are emitted
        for (int i = 0; i < d.count; i++)
            if (d.parents[i] + 1 == taken.back() && d.tokens[i] == best_[first + taken.back()]) taken.push_back(i + 1);
        const int count = (int)taken.size();
        bool over = false;
        for (int i = 0; i < count; i++) {
            const int row = taken[i];
            const int32_t token = best_[first + row];
            for (int g = 0; g < m_.groups && row != i; g++)
                m_.copy_slots(slot(g, s, x.length - 1 + row), slot(g, s, x.length - 1 + i));
            if (r_.method == EAGLE3) {
                std::copy_n(m_.aux.data + (int64_t)(first + row) * aux, aux, x.aux + (int64_t)x.pending * aux);
                x.positions[x.pending] = x.length - 1 + i;
                x.after[x.pending++] = token;
            }
            x.tokens[x.known++] = token;
            over |= std::count(x.ends, x.ends + x.ends_n, token) > 0;
        }
        if (r_.method == MEDUSA) {
            std::copy_n(m_.hidden.data + (int64_t)(first + taken.back()) * m_.c.hidden, m_.c.hidden, x.aux);
            x.pending = 1;
        }
        x.length += count;
        x.left -= count;
        r_.depths[at] = d.count ? *std::max_element(d.depths.begin(), d.depths.begin() + d.count) : 0;
        r_.accepted[at] = count - 1;
        for (int i = 0; r_.method == LOOKUP && i < std::min(count, d.count); i++) {
            float* odds = r_.odds + odds_of(d.match + i);
            odds[0] = (float)(odds[0] * ODDS_KEPT + (i < count - 1));
            odds[ODDS] = (float)(odds[ODDS] * ODDS_KEPT + 1);
        }
        return over || x.left <= 0;
    }

    Model& m_;
    const Rounds& r_;
    std::vector<Nodes> drafts_;
    std::vector<float> chances_;
    std::vector<int32_t> tokens_, positions_, slots_, starts_, lens_, rows_, best_;
    std::vector<const uint8_t*> masks_;
};
