// Attention to the tokens with which several sequences begin: a system prompt, say, that many requests have.
//
// Sequences whose tables begin with the same blocks begin with the same tokens. Their queries are a tile over its keys
// and values, which are read once for all of them. attention.h goes on behind it from the same sums, for each sequence
// alone. vLLM and FlashInfer call this cascade attention.
//
// A sequence may share 128 tokens with all others, and 1,024 with some. It is in at most one group: either all are one
// group, over 128 tokens, or those that share 1,024 are, whichever saves more reads. Groups are the same in all layers
// of a step.

#pragma once

#include <vector>

#include "tile.h"

namespace {

constexpr long MIN_ROWS = 16, MIN_PREFIX = 2 * PANEL;  // queries of a KV head, and tokens: below, it is not faster
constexpr long MAX_ROWS = 192;                         // queries of a tile

struct Group { long begin, end, length; };  // sequences begin..end of an order, and the tokens that all of them share

// --8<-- [start:add_best_groups]
// Append either begin..end as one group, or the groups of its parts that share more tokens, whichever saves more reads;
// requests outside these parts then read alone. Returns the number of reads of a token that are saved. Sequences are in
// an order in which i - 1 and i share common[i] tokens, and more distant ones the least of those between them.
inline long add_best_groups(const std::vector<long>& common, long begin, long end, long min_count,
                            std::vector<Group>& groups) {
    if (end - begin < min_count) return 0;
    const long length = *std::min_element(common.begin() + begin + 1, common.begin() + end);
    const long saved_by_one = length < MIN_PREFIX ? 0 : (end - begin - 1) * length;
    const size_t num_before = groups.size();
    long saved_by_several = 0;
    for (long from = begin, to; from < end; from = to) {
        for (to = from + 1; to < end && common[to] > length;) to++;
        saved_by_several += add_best_groups(common, from, to, min_count, groups);
    }
    if (saved_by_one <= saved_by_several) return saved_by_several;
    groups.resize(num_before);
    groups.push_back({begin, end, length});
    return saved_by_one;
}
// --8<-- [end:add_best_groups]

// Sort sequences by their tables, and return how many tokens each shares with the one before, in whole panels. Only
// blocks that are full of tokens are compared.
inline std::vector<long> sort_by_table(std::vector<long>& order, const int32_t* tables, const int32_t* lengths,
                                       const Shape& shape) {
    const auto table = [&](long seq) { return tables + seq * shape.table_stride; };
    const auto num_blocks = [&](long seq) { return lengths[seq] / shape.block_size; };
    std::sort(order.begin(), order.end(), [&](long a, long b) {
        const long most = std::min(num_blocks(a), num_blocks(b));
        const int difference = std::memcmp(table(a), table(b), most * sizeof(int32_t));
        return difference ? difference < 0 : num_blocks(a) < num_blocks(b);
    });
    std::vector<long> common(order.size());
    for (size_t i = 1; i < order.size(); i++) {
        const int32_t* one = table(order[i - 1]);
        const long most = std::min(num_blocks(order[i - 1]), num_blocks(order[i]));
        const long same = std::mismatch(one, one + most, table(order[i])).first - one;
        common[i] = same * shape.block_size / PANEL * PANEL;
    }
    return common;
}

struct SharedPrefixes {
    std::vector<long> lengths;                 // [num_seqs]: tokens that are computed here, 0 for most sequences
    std::vector<float> sums, largest, totals;  // [num_seqs, heads], sums with [head_dim]: state of the pass behind them
    std::vector<long> order;                   // sequences, those that begin with the same blocks side by side
    std::vector<Group> tiles;                  // the groups, in parts for all threads

    SharedPrefixes(const int32_t* tables, const int32_t* all_lengths, const Shape& shape, int threads)
        : lengths(shape.num_seqs) {
        for (long seq = 0; seq < shape.num_seqs; seq++)
            if (all_lengths[seq] >= MIN_PREFIX) order.push_back(seq);
        const long group = shape.heads / shape.kv_heads, max_count = MAX_ROWS / group;
        if (order.size() < 2 || max_count < 2) return;
        const std::vector<long> common = sort_by_table(order, tables, all_lengths, shape);
        const long min_count = std::max(2L, (MIN_ROWS + group - 1) / group);
        std::vector<Group> groups;
        add_best_groups(common, 0, order.size(), min_count, groups);
        if (groups.empty()) return;
        const long wanted = (threads + shape.kv_heads - 1) / shape.kv_heads;
        for (const auto& [begin, end, length] : groups) {
            for (long i = begin; i < end; i++) lengths[order[i]] = length;
            const long count = end - begin;
            const long num_tiles = std::max((count + max_count - 1) / max_count, std::min(wanted, count / min_count));
            for (long t = 0; t < num_tiles; t++)
                tiles.push_back({begin + t * count / num_tiles, begin + (t + 1) * count / num_tiles, length});
        }
        sums.resize(shape.num_seqs * shape.heads * shape.head_dim);
        largest.resize(shape.num_seqs * shape.heads), totals.resize(largest.size());
    }

    // Compute the state of one layer.
    template <class T, class K>
    void attend(const T* query, const K* keys, const K* values, const int32_t* tables, const Shape& shape, float scale,
                int threads) {
        if (tiles.empty()) return;
        const long dim = shape.head_dim, group = shape.heads / shape.kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
        for (size_t t = 0; t < tiles.size(); t++)
            for (long kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
                const long* seqs = &order[tiles[t].begin];
                const long first = kv_head * group, rows = (tiles[t].end - tiles[t].begin) * group;
                Tile<T, K> tile(rows, dim);
                for (long r = 0; r < rows; r++)
                    tile.set_query(r, query + seqs[r / group] * shape.query_stride + (first + r % group) * dim);
                const int32_t* table = tables + seqs[0] * shape.table_stride;
                tile.attend(keys, values, table, tiles[t].length, 0, shape, kv_head, scale);
                for (long r = 0; r < rows; r++) {
                    const long head = seqs[r / group] * shape.heads + first + r % group;
                    largest[head] = tile.largest(r) * scale, totals[head] = tile.total(r);
                    for (long i = 0; i < dim; i += LANES) store(&sums[head * dim + i], tile.sum(r, i));
                }
            }
    }
};

}  // namespace
