#include "baseline.h"

#include "avx2.h"

#ifdef HAVE_AVX2
#include <stdlib.h>
#include <string.h>

#include "color.h"
#include "huffman.h"
#include "idct.h"
#include "scratch.h"

#define MARGIN_BYTES 32 /* on either side of a row of samples, so that vector loads may overrun it */
#define MAX_PLANE_BYTES ((size_t)64 << 20)

struct component {
    const struct huffman_table *dc, *ac;
    int16_t quant[64];  /* quantization table, in natural order */
    int h_samp, v_samp; /* sampling factors: blocks of an MCU, horizontally and vertically */
    int last_dc;        /* DC coefficient of the previous block, which the next one is coded relative to */
    uint8_t *plane;     /* decoded samples of the area, behind a margin */
    size_t stride;      /* bytes from one row of the plane to the next */
};

struct baseline_decoder {
    struct huffman_table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
    struct component components[3];
    int num_components;
    struct bit_reader reader;
    int restart_interval; /* MCUs between two RST markers; 0: there are none */
    int mcus_to_restart;  /* MCUs until the next RST marker */
    int next_restart;     /* number of the next RST marker, 0 to 7 */
    struct scratch planes, chroma_rows;
};

/* Index in a block of the coefficients in zigzag order. */
static const uint8_t zigzag[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
};

baseline_decoder *baseline_new(void) { return calloc(1, sizeof(baseline_decoder)); }

void baseline_free(baseline_decoder *decoder) {
    if (!decoder) return;
    scratch_free(&decoder->planes);
    scratch_free(&decoder->chroma_rows);
    free(decoder);
}

int baseline_is_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"); }

/* Decode the AC coefficient that follows the one at `index`, into `out` if `store`; return its index. */
AVX2_BMI2_INLINE int decode_ac(const struct huffman_table *table, uint64_t *bits, int *count, int index, int16_t *out,
                               int store) {
    huffman_entry entry = huffman_lookup(table, *bits, 0);
    index += (int)(entry >> 24);
    if (store && index < 64) out[zigzag[index]] = (int16_t)huffman_extend(*bits, entry);
    *bits <<= entry & 63;
    *count -= (int)(entry & 63);
    return index;
}

/* Decode a block, into `out` if `store`. Returns the index of its last coefficient, plus HUFFMAN_EOB if the block has
   an end-of-block code; 64 to 127 means that it is damaged. */
AVX2_BMI2_INLINE int decode_block(struct bit_reader *reader, struct component *component, int16_t *out, int store) {
    const struct huffman_table *ac = component->ac;
    const uint8_t *next = reader->next;
    uint64_t bits = reader->bits;
    int count = reader->count, index = 0;
    bit_reader_refill(reader, &next, &bits, &count);
    huffman_entry entry = huffman_lookup(component->dc, bits, 1);
    if (__builtin_expect(entry >> 24, 0)) return HUFFMAN_INVALID;
    component->last_dc = (int16_t)(component->last_dc + huffman_extend(bits, entry));
    if (store) out[0] = (int16_t)component->last_dc;
    bits <<= entry & 63;
    count -= (int)(entry & 63);
    for (;;) { /* 56 bits hold a DC and an AC, which take at most 27 and 26 bits, or two ACs */
        if ((index = decode_ac(ac, &bits, &count, index, out, store)) >= 63) break;
        bit_reader_refill(reader, &next, &bits, &count);
        if ((index = decode_ac(ac, &bits, &count, index, out, store)) >= 63) break;
    }
    reader->next = next, reader->bits = bits, reader->count = count;
    return index;
}

/* Consume the RST marker between two restart intervals; return 0 if it is missing or unread bytes precede it. */
static int read_restart_marker(baseline_decoder *decoder) {
    struct bit_reader *reader = &decoder->reader;
    bit_reader_refill_bytes(reader);
    if (reader->count - reader->padding >= 8 || reader->padding > reader->count) return 0;
    const uint8_t *marker = reader->next;
    if (reader->end - marker < 2 || marker[0] != 0xFF || marker[1] != 0xD0 + decoder->next_restart) return 0;
    *reader = (struct bit_reader){marker + 2, reader->end, 0, 0, 0};
    decoder->next_restart = (decoder->next_restart + 1) % 8;
    decoder->mcus_to_restart = decoder->restart_interval;
    for (int i = 0; i < decoder->num_components; i++) decoder->components[i].last_dc = 0;
    return 1;
}

/* Read `count` MCUs of a row; if `store`, write their samples to the planes, from the left edge on. Return 0 if the
   data is damaged. */
AVX2_BMI2_INLINE int read_mcus(baseline_decoder *decoder, int count, int row, int store) {
    for (int mcu = 0; mcu < count; mcu++) {
        if (decoder->restart_interval) {
            if (decoder->mcus_to_restart == 0 && !read_restart_marker(decoder)) return 0;
            decoder->mcus_to_restart--;
        }
        for (int i = 0; i < decoder->num_components; i++) {
            struct component *component = &decoder->components[i];
            for (int y = 0; y < component->v_samp; y++)
                for (int x = 0; x < component->h_samp; x++) {
                    _Alignas(32) int16_t block[64];
                    if (store) memset(block, 0, sizeof block);
                    int last = decode_block(&decoder->reader, component, block, store);
                    if (last >= 64 && last < 128) return 0;
                    if (!store) continue;
                    size_t top = (size_t)((row * component->v_samp + y) * BLOCK_SIDE);
                    size_t left = (size_t)((mcu * component->h_samp + x) * BLOCK_SIDE);
                    uint8_t *out = component->plane + top * component->stride + left;
                    if (last == HUFFMAN_EOB)
                        idct_dc_only(block[0], component->quant[0], out, component->stride);
                    else
                        idct_block(block, component->quant, out, component->stride);
                }
        }
    }
    return 1;
}

AVX2_BMI2 static __attribute__((noinline)) int skip_mcus(baseline_decoder *decoder, int count) {
    return read_mcus(decoder, count, 0, 0);
}

AVX2_BMI2 static __attribute__((noinline)) int decode_mcus(baseline_decoder *decoder, int count, int row) {
    return read_mcus(decoder, count, row, 1);
}

/* The MCUs to decode; `columns` is the number of MCUs in a row of the image. */
struct mcu_area {
    int first_column, end_column, columns, first_row, end_row;
};

static uint8_t *sample_row(const struct component *component, int row) {
    return component->plane + (size_t)row * component->stride;
}

/* Repeat the chroma samples at the left and right edge of the image, where upsampling reads beyond them. */
static void pad_chroma_edges(const baseline_decoder *decoder, const struct mcu_area *area, int chroma_width) {
    int left = area->first_column * BLOCK_SIDE, rows = (area->end_row - area->first_row) * BLOCK_SIDE;
    for (int i = 1; i < decoder->num_components; i++)
        for (int row = 0; row < rows; row++) {
            uint8_t *samples = sample_row(&decoder->components[i], row);
            if (left == 0) samples[-1] = samples[0];
            if (area->end_column == area->columns) samples[chroma_width - left] = samples[chroma_width - left - 1];
        }
}

/* Upsample the chroma of the region and convert it to RGB. */
static enum crop_status convert_region(baseline_decoder *decoder, const struct mcu_area *area,
                                       const struct baseline_region *region, int chroma_height, uint8_t *pixels,
                                       size_t stride) {
    const struct component *luma = &decoder->components[0];
    int h_samp = luma->h_samp, v_samp = luma->v_samp;
    int left = area->first_column * BLOCK_SIDE, top = area->first_row * BLOCK_SIDE; /* of the chroma planes */
    int from = region->left / h_samp, end = (region->right + h_samp - 1) / h_samp;
    size_t row_bytes = (size_t)(end - from) * 2 + MARGIN_BYTES;
    uint8_t *chroma_rows = scratch_reserve(&decoder->chroma_rows, 2 * row_bytes);
    if (!chroma_rows) return CROP_NO_MEMORY;
    for (int row = region->top; row < region->bottom; row++, pixels += stride) {
        const uint8_t *chroma[2] = {NULL, NULL};
        int nearest = row / v_samp, next = row % v_samp ? nearest + 1 : nearest - 1;
        next = next < 0 ? 0 : next < chroma_height ? next : chroma_height - 1;
        for (int i = 1; i < decoder->num_components; i++) {
            const struct component *component = &decoder->components[i];
            const uint8_t *near_row = sample_row(component, nearest - top) + (from - left), *next_row = NULL;
            if (h_samp == 1 && v_samp == 1) {
                chroma[i - 1] = near_row;
                continue;
            }
            if (v_samp > 1) next_row = sample_row(component, next - top) + (from - left);
            uint8_t *upsampled = chroma_rows + (size_t)(i - 1) * row_bytes;
            upsample_row(near_row, next_row, end - from, h_samp > 1, row % v_samp ? 2 : 1, upsampled);
            chroma[i - 1] = upsampled + (region->left - from * h_samp);
        }
        const uint8_t *y = sample_row(luma, row - top * v_samp) + (region->left - left * h_samp);
        ycc_to_rgb(y, chroma[0], chroma[1], region->right - region->left, pixels);
    }
    return CROP_OK;
}

/* Return the MCUs of a region, including the neighbors that upsampling reads where chroma is subsampled. */
static struct mcu_area find_mcus(const struct jpeg_decompress_struct *jpeg, const struct baseline_region *region,
                                 int h_samp, int v_samp) {
    int width = (int)jpeg->image_width, height = (int)jpeg->image_height;
    int pad_x = h_samp > 1 ? 2 : 0, pad_y = v_samp > 1 ? 2 : 0;
    int mcu_width = h_samp * BLOCK_SIDE, mcu_height = v_samp * BLOCK_SIDE;
    int left = region->left > pad_x ? region->left - pad_x : 0, top = region->top > pad_y ? region->top - pad_y : 0;
    int right = region->right + pad_x < width ? region->right + pad_x : width;
    int bottom = region->bottom + pad_y < height ? region->bottom + pad_y : height;
    return (struct mcu_area){
        .first_column = left / mcu_width,
        .end_column = (right + mcu_width - 1) / mcu_width,
        .columns = (width + mcu_width - 1) / mcu_width,
        .first_row = top / mcu_height,
        .end_row = (bottom + mcu_height - 1) / mcu_height,
    };
}

/* Set up the Huffman and quantization tables of a component. */
static enum crop_status prepare_tables(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                       int index) {
    struct component *component = &decoder->components[index];
    const jpeg_component_info *info = &jpeg->comp_info[index];
    if (info->dc_tbl_no >= NUM_HUFF_TBLS || info->ac_tbl_no >= NUM_HUFF_TBLS) return CROP_UNSUPPORTED;
    if (info->quant_tbl_no >= NUM_QUANT_TBLS) return CROP_UNSUPPORTED;
    const JHUFF_TBL *dc = jpeg->dc_huff_tbl_ptrs[info->dc_tbl_no], *ac = jpeg->ac_huff_tbl_ptrs[info->ac_tbl_no];
    const JQUANT_TBL *quant = jpeg->quant_tbl_ptrs[info->quant_tbl_no];
    if (!dc || !ac || !quant) return CROP_UNSUPPORTED;
    component->dc = huffman_build_table(&decoder->dc[info->dc_tbl_no], dc, 1);
    component->ac = huffman_build_table(&decoder->ac[info->ac_tbl_no], ac, 0);
    if (!component->dc || !component->ac) return CROP_UNSUPPORTED;
    for (int k = 0; k < 64; k++) component->quant[k] = (int16_t)quant->quantval[k];
    component->last_dc = 0;
    return CROP_OK;
}

/* Allocate the planes of an area, set up the tables and rewind the bit reader. */
static enum crop_status prepare(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                const struct mcu_area *area) {
    size_t columns = (size_t)(area->end_column - area->first_column), rows = (size_t)(area->end_row - area->first_row);
    size_t bytes = 0;
    for (int i = 0; i < decoder->num_components; i++) {
        struct component *component = &decoder->components[i];
        enum crop_status status = prepare_tables(decoder, jpeg, i);
        if (status != CROP_OK) return status;
        component->stride = columns * (size_t)component->h_samp * BLOCK_SIDE + 2 * MARGIN_BYTES;
        bytes += component->stride * rows * (size_t)component->v_samp * BLOCK_SIDE;
        if (bytes > MAX_PLANE_BYTES) return CROP_UNSUPPORTED;
    }
    uint8_t *plane = scratch_reserve(&decoder->planes, bytes);
    if (!plane) return CROP_NO_MEMORY;
    for (int i = 0; i < decoder->num_components; i++) {
        struct component *component = &decoder->components[i];
        component->plane = plane + MARGIN_BYTES;
        plane += component->stride * rows * (size_t)component->v_samp * BLOCK_SIDE;
    }
    const uint8_t *data = jpeg->src->next_input_byte;
    decoder->reader = (struct bit_reader){data, data + jpeg->src->bytes_in_buffer, 0, 0, 0};
    decoder->restart_interval = decoder->mcus_to_restart = (int)jpeg->restart_interval;
    decoder->next_restart = 0;
    return CROP_OK;
}

static enum crop_status decode_area(baseline_decoder *decoder, const struct mcu_area *area) {
    const struct bit_reader *reader = &decoder->reader;
    for (int row = 0; row < area->end_row; row++) {
        int above = row < area->first_row;
        int first = above ? area->columns : area->first_column, end = above ? first : area->end_column;
        int ok = skip_mcus(decoder, first) && decode_mcus(decoder, end - first, row - area->first_row) &&
                 skip_mcus(decoder, area->columns - end);
        if (!ok || reader->padding > reader->count) return CROP_DAMAGED;
    }
    return CROP_OK;
}

enum crop_status baseline_decode(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                 const struct baseline_region *region, uint8_t *pixels, size_t stride) {
    const jpeg_component_info *first = jpeg->comp_info;
    int is_gray = jpeg->num_components == 1;
    int h_samp = is_gray ? 1 : first->h_samp_factor, v_samp = is_gray ? 1 : first->v_samp_factor;
    int chroma_width = ((int)jpeg->image_width + h_samp - 1) / h_samp;
    int chroma_height = ((int)jpeg->image_height + v_samp - 1) / v_samp;
    if (!is_gray && jpeg->jpeg_color_space != JCS_YCbCr) return CROP_UNSUPPORTED;
    /* libjpeg reads such an image further down than we do, and would find damage there. */
    if (is_gray && first->v_samp_factor > 1) return CROP_UNSUPPORTED;
    if (jpeg->Ss != 0 || jpeg->Se != 63 || jpeg->Ah != 0 || jpeg->Al != 0) return CROP_UNSUPPORTED;
    for (int i = 0; i < jpeg->num_components; i++)
        if (jpeg->cur_comp_info[i] != &first[i]) return CROP_UNSUPPORTED; /* components in another order */
    if (h_samp > 1 && chroma_width <= 2) return CROP_UNSUPPORTED; /* libjpeg replicates these instead of filtering */
    decoder->num_components = jpeg->num_components;
    for (int i = 0; i < decoder->num_components; i++) {
        decoder->components[i].h_samp = i ? 1 : h_samp;
        decoder->components[i].v_samp = i ? 1 : v_samp;
    }
    struct mcu_area area = find_mcus(jpeg, region, h_samp, v_samp);
    enum crop_status status = prepare(decoder, jpeg, &area);
    if (status == CROP_OK) status = decode_area(decoder, &area);
    if (status == CROP_OK) {
        pad_chroma_edges(decoder, &area, chroma_width);
        status = convert_region(decoder, &area, region, chroma_height, pixels, stride);
    }
    scratch_trim(&decoder->planes);
    return status;
}
#else
baseline_decoder *baseline_new(void) { return NULL; }
void baseline_free(baseline_decoder *decoder) { (void)decoder; }
int baseline_is_supported(void) { return 0; }
enum crop_status baseline_decode(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                 const struct baseline_region *region, uint8_t *pixels, size_t stride) {
    (void)decoder, (void)jpeg, (void)region, (void)pixels, (void)stride;
    return CROP_UNSUPPORTED;
}
#endif
