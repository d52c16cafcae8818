#include "baseline.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <stdlib.h>
#include <string.h>

#include "avx2.h"
#include "resize.h"

#define FAST __attribute__((target("avx2,bmi2")))
#define FAST_INLINE static inline __attribute__((always_inline, target("avx2,bmi2")))

#define SIDE 8
#define LOOK 10 /* codes up to so many bits are found in one step */
#define MARGIN 32 /* bytes beside a line of samples that may be read */
#define MAX_PLANES ((size_t)64 << 20)

/* What follows a code, in one number: bits 0-5 are how many bits it and its value take, 8-15 how many of them are the
   code, 16-23 how many the value; bits 24-31 are by how much the index of the coefficient grows. */
typedef uint32_t step;
#define STEP(code, value, advance) \
    ((step)((code) + (value)) | (step)(code) << 8 | (step)(value) << 16 | (step)(advance) << 24)
#define NO_CODE 64 /* an advance that leads out of the block, as do runs that are too long */
#define BLOCK_ENDS 128
#define LONGER 0 /* no step: look at more than LOOK bits */

struct table {
    uint8_t bits[17], values[256]; /* what it was made of */
    int made;
    step steps[1 << LOOK];
    uint32_t limit[17]; /* the first 16 bits that are beyond the codes of a length */
    int offset[17];
};

/* The bits of a scan, the next one on top. Where they end, zeros follow, which are counted. */
struct reader {
    const uint8_t *at, *end;
    uint64_t bits;
    int count, padded;
};

struct component {
    const struct table *dc, *ac;
    int16_t quantum[64];
    int across, down; /* blocks in an MCU */
    int last;         /* the DC before */
    uint8_t *plane;
    size_t stride;
};

struct baseline_decoder {
    struct table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
    struct component components[3];
    int count;
    struct reader reader;
    int interval, restarts_in, restart; /* MCUs from one restart marker to the next, to the next one, and its number */
    struct resize_memory planes, lines;
};

/* Where the coefficients lie in a block, in the order in which they are coded. */
static const uint8_t natural[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
};

baseline_decoder *baseline_new(void) { return calloc(1, sizeof(baseline_decoder)); }

void baseline_free(baseline_decoder *decoder) {
    if (!decoder) return;
    resize_free(&decoder->planes);
    resize_free(&decoder->lines);
    free(decoder);
}

int baseline_runs_here(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"); }

static step step_of(int symbol, int length, int is_dc) {
    int run = symbol >> 4, size = symbol & 15;
    if (is_dc) return symbol > 11 ? STEP(length, 0, NO_CODE) : STEP(length, symbol, 0);
    if (size == 0) return STEP(length, 0, run == 15 ? 16 : BLOCK_ENDS);
    return size > 10 ? STEP(length, 0, NO_CODE) : STEP(length, size, run + 1);
}

/* Make a table, unless it is the one made last; NULL if libjpeg would refuse it. */
static const struct table *made(struct table *table, const JHUFF_TBL *from, int is_dc) {
    if (table->made && !memcmp(table->bits, from->bits, sizeof table->bits) &&
        !memcmp(table->values, from->huffval, sizeof table->values))
        return table;
    memcpy(table->bits, from->bits, sizeof table->bits);
    memcpy(table->values, from->huffval, sizeof table->values);
    memset(table->steps, LONGER, sizeof table->steps);
    table->made = 0;
    uint32_t code = 0;
    int index = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        int count = table->bits[length];
        if (index + count > 256 || code + (uint32_t)count >= 1u << length) return NULL; /* no code is all ones */
        table->offset[length] = index - (int)code;
        for (int i = 0; i < count; i++, index++, code++) {
            if (is_dc && table->values[index] > 15) return NULL;
            if (length > LOOK) continue;
            step one = step_of(table->values[index], length, is_dc);
            uint32_t same = 1u << (LOOK - length);
            for (uint32_t k = 0; k < same; k++) table->steps[code * same + k] = one;
        }
        table->limit[length] = code << (16 - length);
    }
    table->made = 1;
    return table;
}

/* The step of a code of more than LOOK bits. */
static __attribute__((noinline)) step long_step(const struct table *table, uint64_t bits, int is_dc) {
    uint32_t top = (uint32_t)(bits >> 48);
    for (int length = LOOK + 1; length <= 16; length++)
        if (top < table->limit[length])
            return step_of(table->values[table->offset[length] + (int)(top >> (16 - length))], length, is_dc);
    return STEP(1, 0, NO_CODE);
}

/* Make sure of 56 bits or more, byte by byte. */
static __attribute__((noinline)) void refill_slowly(struct reader *reader) {
    while (reader->count < 56) {
        uint64_t byte = 0;
        if (reader->at < reader->end && (*reader->at != 0xFF || (reader->end - reader->at > 1 && reader->at[1] == 0))) {
            byte = *reader->at;
            reader->at += byte == 0xFF ? 2 : 1; /* a zero keeps 0xFF from being a marker */
        } else {
            reader->padded += 8;
        }
        reader->bits |= byte << (56 - reader->count);
        reader->count += 8;
    }
}

/* The same, eight bytes at once where none is 0xFF. What changes is held in registers, hence apart from the rest. */
FAST_INLINE void refill(struct reader *reader, const uint8_t **at, uint64_t *bits, int *count) {
    uint64_t word;
    if (__builtin_expect(reader->end - *at >= 8, 1)) {
        memcpy(&word, *at, 8);
        if (__builtin_expect(!((~word - 0x0101010101010101u) & word & 0x8080808080808080u), 1)) {
            *bits |= __builtin_bswap64(word) >> *count;
            *at += (63 - *count) >> 3;
            *count |= 56;
            return;
        }
    }
    reader->at = *at, reader->bits = *bits, reader->count = *count;
    refill_slowly(reader);
    *at = reader->at, *bits = reader->bits, *count = reader->count;
}

FAST_INLINE step next_step(const struct table *table, uint64_t bits, int is_dc) {
    step found = table->steps[bits >> (64 - LOOK)];
    return __builtin_expect(found == LONGER, 0) ? long_step(table, bits, is_dc) : found;
}

/* The number that follows a code. */
FAST_INLINE int value_of(uint64_t bits, step next) {
    uint64_t value = bits << ((next >> 8) & 63);
    int size = (next >> 16) & 15;
    int negative = (int)~((int64_t)value >> 63); /* those that begin with a zero */
    return (int)(value >> 1 >> (63 - size)) + (negative & (1 - (1 << size)));
}

/* Read the next coefficient of a block behind that at index `at`, into `out` if wanted, and tell its index. */
FAST_INLINE int read_ac(const struct table *table, uint64_t *bits, int *count, int at, int16_t *out, int wanted) {
    step next = next_step(table, *bits, 0);
    at += (int)(next >> 24);
    if (wanted && at < 64) out[natural[at]] = (int16_t)value_of(*bits, next);
    *bits <<= next & 63;
    *count -= (int)(next & 63);
    return at;
}

/* Read a block, and its coefficients into `out` if wanted. Tells the index of the last one, or 128 more where the
   block ends by a code; from 64 to 127 means that it is damaged. */
FAST_INLINE int read_block(struct reader *reader, struct component *component, int16_t *out, int wanted) {
    const struct table *ac = component->ac;
    const uint8_t *from = reader->at;
    uint64_t bits = reader->bits;
    int count = reader->count, at = 0;
    refill(reader, &from, &bits, &count);
    step next = next_step(component->dc, bits, 1);
    if (__builtin_expect(next >> 24, 0)) return NO_CODE;
    component->last = (int16_t)(component->last + value_of(bits, next));
    if (wanted) out[0] = (int16_t)component->last;
    bits <<= next & 63;
    count -= (int)(next & 63);
    for (;;) { /* 56 bits hold a DC and an AC, which take 27 and 26 at most, or two ACs */
        if ((at = read_ac(ac, &bits, &count, at, out, wanted)) >= 63) break;
        refill(reader, &from, &bits, &count);
        if ((at = read_ac(ac, &bits, &count, at, out, wanted)) >= 63) break;
    }
    reader->at = from, reader->bits = bits, reader->count = count;
    return at;
}

/* Of two rows of eight, halves of the first and of the second by turns: the inverse transform wants them so. */
FAST_INLINE __m256i in_turns(__m256i rows) { return _mm256_permute4x64_epi64(rows, 0xD8); }

FAST_INLINE __m256i other_half(__m256i pair) { return _mm256_shuffle_epi32(pair, 0x4E); }

/* Sums of pairs, each of a number from `one` and one from `other`, by weights in 2^-13. */
FAST_INLINE __m256i mixed(__m256i one, __m256i other, int by_one, int by_other) {
    const __m256i weights = _mm256_set1_epi32((int)((uint32_t)(uint16_t)by_one | (uint32_t)(uint16_t)by_other << 16));
    return _mm256_madd_epi16(_mm256_unpacklo_epi16(one, other), weights);
}

/* Eight inverse DCTs of eight numbers, side by side: libjpeg's accurate one, with its 16 bits. Numbers 0 and 4 come in
   pairs[0], in turns, and so on. */
FAST_INLINE void transform(const __m256i *pairs, int shift, __m256i *out) {
    const __m256i zero = _mm256_setzero_si256(), round = _mm256_set1_epi32(1 << (shift - 1));
    __m256i v1 = pairs[1], v2 = pairs[2], v3 = pairs[3], v5 = other_half(v1), v6 = other_half(v2), v7 = other_half(v3);
    __m256i v4 = other_half(pairs[0]);
    __m256i sum = _mm256_unpacklo_epi16(zero, _mm256_add_epi16(pairs[0], v4)); /* in the upper half of 32 bits */
    __m256i difference = _mm256_unpacklo_epi16(zero, _mm256_sub_epi16(pairs[0], v4));
    sum = _mm256_add_epi32(_mm256_srai_epi32(sum, 16 - 13), round);
    difference = _mm256_add_epi32(_mm256_srai_epi32(difference, 16 - 13), round);
    __m256i t2 = mixed(v2, v6, 4433, 4433 - 15137), t3 = mixed(v2, v6, 4433 + 6270, 4433);
    __m256i even[4] = {_mm256_add_epi32(sum, t3), _mm256_add_epi32(difference, t2), _mm256_sub_epi32(difference, t2),
                       _mm256_sub_epi32(sum, t3)};

    __m256i s3 = _mm256_add_epi16(v7, v3), s4 = _mm256_add_epi16(v5, v1);
    __m256i z3 = mixed(s3, s4, 9633 - 16069, 9633), z4 = mixed(s3, s4, 9633, 9633 - 3196);
    __m256i odd[4] = {
        _mm256_add_epi32(mixed(v7, v1, -7373, 12299 - 7373), z4),
        _mm256_add_epi32(mixed(v5, v3, -20995, 25172 - 20995), z3),
        _mm256_add_epi32(mixed(v5, v3, 16819 - 20995, -20995), z4),
        _mm256_add_epi32(mixed(v7, v1, 2446 - 7373, -7373), z3),
    };
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_srai_epi32(_mm256_add_epi32(even[i], odd[i]), shift);
        out[7 - i] = _mm256_srai_epi32(_mm256_sub_epi32(even[i], odd[i]), shift);
    }
}

/* Eight rows of 32 bits into columns of 16: 0 and 4 in turns, and so on. */
FAST_INLINE void transpose(const __m256i *rows, __m256i *pairs) {
    __m256i fours[4]; /* rows 0 to 3 or 4 to 7 of two columns in each half */
    for (int i = 0; i < 2; i++) {
        const __m256i *four = rows + 4 * i;
        __m256i one = _mm256_packs_epi32(four[0], four[1]), two = _mm256_packs_epi32(four[2], four[3]);
        __m256i evens = _mm256_unpacklo_epi16(one, two), odds = _mm256_unpackhi_epi16(one, two);
        fours[i] = _mm256_unpacklo_epi16(evens, odds);
        fours[i + 2] = _mm256_unpackhi_epi16(evens, odds);
    }
    for (int i = 0; i < 2; i++) {
        pairs[2 * i] = in_turns(_mm256_unpacklo_epi64(fours[2 * i], fours[2 * i + 1]));
        pairs[2 * i + 1] = in_turns(_mm256_unpackhi_epi64(fours[2 * i], fours[2 * i + 1]));
    }
}

/* Coefficients into samples. Where only the first row has any, what is too large wraps around instead of being clipped:
   as in libjpeg, so that even damage looks the same. */
FAST static void put_block(const int16_t *block, const int16_t *quantum, uint8_t *out, size_t stride) {
    const __m256i high_half = _mm256_setr_epi64x(0, 0, -1, -1);
    __m256i numbers[4], pairs[4], v[SIDE];
    for (int i = 0; i < 4; i++) numbers[i] = two_eights(block + i * SIDE, block + (i + 4) * SIDE);
    __m256i rest = _mm256_or_si256(_mm256_or_si256(numbers[1], numbers[2]), numbers[3]);
    if (_mm256_testz_si256(rest, rest) && _mm256_testz_si256(numbers[0], high_half)) {
        __m128i first = _mm_mullo_epi16(_mm256_castsi256_si128(numbers[0]), _mm_loadu_si128((const __m128i *)quantum));
        __m256i both = _mm256_broadcastsi128_si256(_mm_slli_epi16(first, 2));
        const __m256i four_times = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0908090809080908, 0x0100010001000100));
        for (int i = 0; i < 4; i++)
            pairs[i] = _mm256_shuffle_epi8(both, _mm256_add_epi8(four_times, _mm256_set1_epi8((char)(2 * i))));
    } else {
        for (int i = 0; i < 4; i++) {
            __m256i steps = two_eights(quantum + i * SIDE, quantum + (i + 4) * SIDE);
            pairs[i] = in_turns(_mm256_mullo_epi16(numbers[i], steps));
        }
        transform(pairs, 11, v);
        transpose(v, pairs);
    }
    transform(pairs, 18, v);
    /* Each of the eight is a column now: into bytes, and four by four into rows. */
    const __m256i across = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5,
                                            9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i middle = _mm256_set1_epi8(-128);
    __m256i halves[2];
    for (int i = 0; i < 2; i++) {
        __m256i one = _mm256_packs_epi32(v[4 * i], v[4 * i + 1]), two = _mm256_packs_epi32(v[4 * i + 2], v[4 * i + 3]);
        halves[i] = _mm256_shuffle_epi8(_mm256_xor_si256(_mm256_packs_epi16(one, two), middle), across);
    }
    for (int i = 0; i < 2; i++) {
        __m256i rows = i ? _mm256_unpackhi_epi32(halves[0], halves[1]) : _mm256_unpacklo_epi32(halves[0], halves[1]);
        __m128i upper = _mm256_castsi256_si128(rows), lower = _mm256_extracti128_si256(rows, 1);
        uint8_t *to = out + (size_t)(2 * i) * stride;
        _mm_storel_epi64((__m128i *)to, upper);
        _mm_storeh_pd((double *)(to + stride), _mm_castsi128_pd(upper));
        _mm_storel_epi64((__m128i *)(to + 4 * stride), lower);
        _mm_storeh_pd((double *)(to + 5 * stride), _mm_castsi128_pd(lower));
    }
}

/* The same of a block that has only a DC. */
static void put_flat(int dc, int quantum, uint8_t *out, size_t stride) {
    int level = (((int16_t)((uint32_t)dc * (uint32_t)quantum << 2) + 16) >> 5) + 128;
    level = level < 0 ? 0 : level > 255 ? 255 : level;
    for (int i = 0; i < SIDE; i++) memset(out + (size_t)i * stride, level, SIDE);
}

/* Between two intervals there is a marker, and no whole byte before it; 0 if there is not. */
static int restart(baseline_decoder *decoder) {
    struct reader *reader = &decoder->reader;
    refill_slowly(reader);
    if (reader->count - reader->padded >= 8 || reader->padded > reader->count) return 0;
    if (reader->end - reader->at < 2 || reader->at[0] != 0xFF || reader->at[1] != 0xD0 + decoder->restart) return 0;
    *reader = (struct reader){reader->at + 2, reader->end, 0, 0, 0};
    decoder->restart = (decoder->restart + 1) % 8;
    decoder->restarts_in = decoder->interval;
    for (int i = 0; i < decoder->count; i++) decoder->components[i].last = 0;
    return 1;
}

/* Read MCUs of one row; those that are wanted become samples, from the planes' column of MCUs 0 on. */
FAST_INLINE int read_mcus(baseline_decoder *decoder, int count, int row, int wanted) {
    for (int mcu = 0; mcu < count; mcu++) {
        if (decoder->interval) {
            if (decoder->restarts_in == 0 && !restart(decoder)) return 0;
            decoder->restarts_in--;
        }
        for (int i = 0; i < decoder->count; i++) {
            struct component *component = &decoder->components[i];
            for (int y = 0; y < component->down; y++)
                for (int x = 0; x < component->across; x++) {
                    _Alignas(32) int16_t block[64];
                    if (wanted) memset(block, 0, sizeof block);
                    int last = read_block(&decoder->reader, component, block, wanted);
                    if (last >= 64 && last < 128) return 0;
                    if (!wanted) continue;
                    uint8_t *to = component->plane + (size_t)((row * component->down + y) * SIDE) * component->stride +
                                  (size_t)((mcu * component->across + x) * SIDE);
                    if (last == BLOCK_ENDS)
                        put_flat(block[0], component->quantum[0], to, component->stride);
                    else
                        put_block(block, component->quantum, to, component->stride);
                }
        }
    }
    return 1;
}

FAST static __attribute__((noinline)) int pass_over(baseline_decoder *decoder, int count) {
    return read_mcus(decoder, count, 0, 0);
}

FAST static __attribute__((noinline)) int read_wanted(baseline_decoder *decoder, int count, int row) {
    return read_mcus(decoder, count, row, 1);
}

/* One line of a component, as wide as the image has it: what is stored at half the size is spread as libjpeg does it,
   three parts from the nearest and one from the next. */
FAST static void spread(const uint8_t *near, const uint8_t *far, int count, int wide, int bias, uint8_t *restrict out) {
    if (far && !wide) {
        for (int i = 0; i < count; i++) out[i] = (uint8_t)((3 * near[i] + far[i] + bias) >> 2);
    } else if (far) {
        for (int i = 0; i < count; i++) {
            int before = 3 * near[i - 1] + far[i - 1], here = 3 * near[i] + far[i];
            int after = 3 * near[i + 1] + far[i + 1];
            out[2 * i] = (uint8_t)((3 * here + before + 8) >> 4);
            out[2 * i + 1] = (uint8_t)((3 * here + after + 7) >> 4);
        }
    } else {
        for (int i = 0; i < count; i++) {
            out[2 * i] = (uint8_t)((3 * near[i] + near[i - 1] + 1) >> 2);
            out[2 * i + 1] = (uint8_t)((3 * near[i] + near[i + 1] + 2) >> 2);
        }
    }
}

/* Parts of both colours, of which `low` and `high` hold pairs, in 2^-16. */
FAST_INLINE __m256i weighed(__m256i low, __m256i high, int blue, int red) {
    const __m256i weights = _mm256_set1_epi32((int)((uint32_t)(uint16_t)blue | (uint32_t)(uint16_t)red << 16));
    const __m256i half = _mm256_set1_epi32(1 << 15);
    low = _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(low, weights), half), 16);
    high = _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(high, weights), half), 16);
    return _mm256_packs_epi32(low, high);
}

FAST_INLINE __m128i bytes_of(__m256i words) {
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

FAST_INLINE __m256i words_of(const uint8_t *bytes) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)bytes));
}

/* The first of every three bytes from `one`, and so on. */
FAST_INLINE __m128i every_third(__m128i one, __m128i two, __m128i three) {
    const __m128i seconds = _mm_setr_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0);
    const __m128i thirds = _mm_setr_epi8(0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0);
    return _mm_blendv_epi8(_mm_blendv_epi8(one, two, seconds), three, thirds);
}

/* Y, Cb and Cr into RGB, 16 pixels at a time; without colours into grey. */
FAST static void paint(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out) {
    const __m256i middle = _mm256_set1_epi16(128);
    for (int i = 0; i < count; i += 16) {
        __m128i red = _mm_loadu_si128((const __m128i *)(y + i)), green = red, blue = red;
        if (cb) {
            __m256i light = words_of(y + i);
            __m256i b = _mm256_sub_epi16(words_of(cb + i), middle), r = _mm256_sub_epi16(words_of(cr + i), middle);
            __m256i low = _mm256_unpacklo_epi16(b, r), high = _mm256_unpackhi_epi16(b, r);
            /* 1.402 is 1 + 26345 / 2^16, -0.71414 is -1 + 18734 / 2^16, 1.772 is 2 - 14942 / 2^16. */
            __m256i more_red = _mm256_add_epi16(r, weighed(low, high, 0, 26345));
            __m256i more_green = _mm256_sub_epi16(weighed(low, high, -22554, 18734), r);
            __m256i more_blue = _mm256_add_epi16(_mm256_add_epi16(b, b), weighed(low, high, -14942, 0));
            red = bytes_of(_mm256_add_epi16(light, more_red));
            green = bytes_of(_mm256_add_epi16(light, more_green));
            blue = bytes_of(_mm256_add_epi16(light, more_blue));
        }
        /* Of three pieces of 16 bytes each, the first begins with red, the second with green, the third with blue. */
        red = _mm_shuffle_epi8(red, _mm_setr_epi8(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5));
        green = _mm_shuffle_epi8(green, _mm_setr_epi8(5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10));
        blue = _mm_shuffle_epi8(blue, _mm_setr_epi8(10, 5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15));
        __m128i *to = (__m128i *)(out + 3 * i);
        _mm_storeu_si128(to, every_third(red, green, blue));
        _mm_storeu_si128(to + 1, every_third(green, blue, red));
        _mm_storeu_si128(to + 2, every_third(blue, red, green));
    }
}

/* The MCUs that become samples, and how many there are in a row of the image. */
struct area {
    int first_column, end_column, columns, first_row, end_row;
};

static uint8_t *line_of(const struct component *component, int row) {
    return component->plane + (size_t)row * component->stride;
}

/* Beside the image lies what lies at its edge; `width` is that of the colours. */
static void repeat_edges(const baseline_decoder *decoder, const struct area *area, int width) {
    int left = area->first_column * SIDE, rows = (area->end_row - area->first_row) * SIDE;
    for (int i = 1; i < decoder->count; i++)
        for (int row = 0; row < rows; row++) {
            uint8_t *line = line_of(&decoder->components[i], row);
            if (left == 0) line[-1] = line[0];
            if (area->end_column == area->columns) line[width - left] = line[width - left - 1];
        }
}

/* Samples into pixels; `height` is that of the colours. */
static enum crop_status put_pixels(baseline_decoder *decoder, const struct area *area, const struct baseline_part *part,
                                   int height, uint8_t *pixels, size_t stride) {
    const struct component *light = &decoder->components[0];
    int across = light->across, down = light->down;
    int left = area->first_column * SIDE, top = area->first_row * SIDE; /* of the colours' planes */
    int from = part->left / across, end = (part->right + across - 1) / across;
    size_t room = (size_t)(end - from) * 2 + MARGIN;
    uint8_t *lines = resize_room(&decoder->lines, 2 * room);
    if (!lines) return CROP_NO_MEMORY;
    for (int row = part->top; row < part->bottom; row++, pixels += stride) {
        const uint8_t *colours[2] = {NULL, NULL};
        int nearest = row / down, next = row % down ? nearest + 1 : nearest - 1;
        next = next < 0 ? 0 : next < height ? next : height - 1;
        for (int i = 1; i < decoder->count; i++) {
            const struct component *component = &decoder->components[i];
            const uint8_t *near = line_of(component, nearest - top) + (from - left), *far = NULL;
            if (across == 1 && down == 1) {
                colours[i - 1] = near;
                continue;
            }
            if (down > 1) far = line_of(component, next - top) + (from - left);
            uint8_t *line = lines + (size_t)(i - 1) * room;
            spread(near, far, end - from, across > 1, row % down ? 2 : 1, line);
            colours[i - 1] = line + (part->left - from * across);
        }
        const uint8_t *y = line_of(light, row - top * down) + (part->left - left * across);
        paint(y, colours[0], colours[1], part->right - part->left, pixels);
    }
    return CROP_OK;
}

/* Colours at half the size are spread to their neighbours: those are decoded too. */
static struct area area_of(const struct jpeg_decompress_struct *jpeg, const struct baseline_part *part, int across,
                           int down) {
    int width = (int)jpeg->image_width, height = (int)jpeg->image_height;
    int beside = across > 1 ? 2 : 0, above = down > 1 ? 2 : 0;
    int wide = across * SIDE, high = down * SIDE;
    int left = part->left > beside ? part->left - beside : 0, top = part->top > above ? part->top - above : 0;
    int right = part->right + beside < width ? part->right + beside : width;
    int bottom = part->bottom + above < height ? part->bottom + above : height;
    return (struct area){
        .first_column = left / wide,
        .end_column = (right + wide - 1) / wide,
        .columns = (width + wide - 1) / wide,
        .first_row = top / high,
        .end_row = (bottom + high - 1) / high,
    };
}

/* Get tables and planes ready for an image. */
static enum crop_status prepare(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                const struct area *area) {
    size_t columns = (size_t)(area->end_column - area->first_column), rows = (size_t)(area->end_row - area->first_row);
    size_t bytes = 0;
    for (int i = 0; i < decoder->count; i++) {
        struct component *component = &decoder->components[i];
        const jpeg_component_info *info = &jpeg->comp_info[i];
        if (info->dc_tbl_no >= NUM_HUFF_TBLS || info->ac_tbl_no >= NUM_HUFF_TBLS) return CROP_UNSUPPORTED;
        if (info->quant_tbl_no >= NUM_QUANT_TBLS) return CROP_UNSUPPORTED;
        const JHUFF_TBL *dc = jpeg->dc_huff_tbl_ptrs[info->dc_tbl_no], *ac = jpeg->ac_huff_tbl_ptrs[info->ac_tbl_no];
        const JQUANT_TBL *quantum = jpeg->quant_tbl_ptrs[info->quant_tbl_no];
        if (!dc || !ac || !quantum) return CROP_UNSUPPORTED;
        component->dc = made(&decoder->dc[info->dc_tbl_no], dc, 1);
        component->ac = made(&decoder->ac[info->ac_tbl_no], ac, 0);
        if (!component->dc || !component->ac) return CROP_UNSUPPORTED;
        for (int k = 0; k < 64; k++) component->quantum[k] = (int16_t)quantum->quantval[k];
        component->last = 0;
        component->stride = columns * (size_t)component->across * SIDE + 2 * MARGIN;
        bytes += component->stride * rows * (size_t)component->down * SIDE;
        if (bytes > MAX_PLANES) return CROP_UNSUPPORTED;
    }
    uint8_t *plane = resize_room(&decoder->planes, bytes);
    if (!plane) return CROP_NO_MEMORY;
    for (int i = 0; i < decoder->count; i++) {
        struct component *component = &decoder->components[i];
        component->plane = plane + MARGIN;
        plane += component->stride * rows * (size_t)component->down * SIDE;
    }
    const uint8_t *data = jpeg->src->next_input_byte;
    decoder->reader = (struct reader){data, data + jpeg->src->bytes_in_buffer, 0, 0, 0};
    decoder->interval = decoder->restarts_in = (int)jpeg->restart_interval;
    decoder->restart = 0;
    return CROP_OK;
}

static enum crop_status read_area(baseline_decoder *decoder, const struct area *area) {
    const struct reader *reader = &decoder->reader;
    for (int row = 0; row < area->end_row; row++) {
        int above = row < area->first_row;
        int before = above ? area->columns : area->first_column, end = above ? before : area->end_column;
        int fine = pass_over(decoder, before) && read_wanted(decoder, end - before, row - area->first_row) &&
                   pass_over(decoder, area->columns - end);
        if (!fine || reader->padded > reader->count) return CROP_DAMAGED;
    }
    return CROP_OK;
}

enum crop_status baseline_decode(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                 const struct baseline_part *part, uint8_t *pixels, size_t stride) {
    const jpeg_component_info *first = jpeg->comp_info;
    int grey = jpeg->num_components == 1;
    int across = grey ? 1 : first->h_samp_factor, down = grey ? 1 : first->v_samp_factor;
    int width = ((int)jpeg->image_width + across - 1) / across, height = ((int)jpeg->image_height + down - 1) / down;
    if (!grey && jpeg->jpeg_color_space != JCS_YCbCr) return CROP_UNSUPPORTED;
    if (grey && first->v_samp_factor > 1) return CROP_UNSUPPORTED; /* libjpeg looks further down, at what may be damaged */
    if (jpeg->Ss != 0 || jpeg->Se != 63 || jpeg->Ah != 0 || jpeg->Al != 0) return CROP_UNSUPPORTED;
    for (int i = 0; i < jpeg->num_components; i++)
        if (jpeg->cur_comp_info[i] != &first[i]) return CROP_UNSUPPORTED; /* coded in another order */
    if (across > 1 && width <= 2) return CROP_UNSUPPORTED; /* libjpeg does not spread these */
    decoder->count = jpeg->num_components;
    for (int i = 0; i < decoder->count; i++) {
        decoder->components[i].across = i ? 1 : across;
        decoder->components[i].down = i ? 1 : down;
    }
    struct area area = area_of(jpeg, part, across, down);
    enum crop_status status = prepare(decoder, jpeg, &area);
    if (status == CROP_OK) status = read_area(decoder, &area);
    if (status == CROP_OK) {
        repeat_edges(decoder, &area, width);
        status = put_pixels(decoder, &area, part, height, pixels, stride);
    }
    resize_trim(&decoder->planes);
    return status;
}
#else
baseline_decoder *baseline_new(void) { return NULL; }
void baseline_free(baseline_decoder *decoder) { (void)decoder; }
int baseline_runs_here(void) { return 0; }
enum crop_status baseline_decode(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                 const struct baseline_part *part, uint8_t *pixels, size_t stride) {
    (void)decoder, (void)jpeg, (void)part, (void)pixels, (void)stride;
    return CROP_UNSUPPORTED;
}
#endif
