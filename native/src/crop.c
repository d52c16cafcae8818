#include "crop.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jerror.h>
#include <jpeglib.h>

#include "baseline.h"
#include "resize.h"
#include "scratch.h"

#define RESIZE_HEADROOM 2.0 /* scaled decoding leaves at least this factor to the resize, as in decode.py */
#define MAX_PIXELS 178956970.0
#define MAX_BUFFER_BYTES ((size_t)64 << 20) /* larger crops are left to the general decoder */
#define MAX_TAPS 512                        /* with more taps, 14-bit weights are too coarse */
#define MAX_BLUR_FACTOR 8                   /* decode.py reduces larger factors in another way */
#define ROWS_PER_READ 8

/* The width of a block in pixels, with scaled decoding. */
#if JPEG_LIB_VERSION >= 70
#define SCALED_BLOCK_SIDE min_DCT_h_scaled_size
#else
#define SCALED_BLOCK_SIDE min_DCT_scaled_size
#endif

struct crop_decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf error_jump;
    enum crop_status error_status;
    int simd;
    baseline_decoder *baseline; /* NULL if only libjpeg is used */
    struct resize_axis x, y;
    struct scratch pixels, intermediate, last_row;
};

/* libjpeg calls this on an error; it must not return. */
static void on_error(j_common_ptr jpeg) {
    crop_decoder *decoder = jpeg->client_data;
    decoder->error_status = jpeg->err->msg_code == JERR_OUT_OF_MEMORY ? CROP_NO_MEMORY : CROP_DAMAGED;
    longjmp(decoder->error_jump, 1);
}

/* A warning means that data was lost or made up: let the general decoder decide. */
static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0) on_error(jpeg);
}

static void ignore_message(j_common_ptr jpeg) { (void)jpeg; }

crop_decoder *crop_new(int simd) {
    crop_decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder) return NULL;
    decoder->simd = simd && resize_has_simd();
    if (decoder->simd && baseline_is_supported() && !(decoder->baseline = baseline_new())) {
        free(decoder);
        return NULL;
    }
    decoder->jpeg.err = jpeg_std_error(&decoder->errors);
    decoder->errors.error_exit = on_error;
    decoder->errors.emit_message = on_message;
    decoder->errors.output_message = ignore_message;
    decoder->jpeg.client_data = decoder;
    return decoder;
}

void crop_free(crop_decoder *decoder) {
    if (!decoder) return;
    baseline_free(decoder->baseline);
    resize_axis_free(&decoder->x);
    resize_axis_free(&decoder->y);
    scratch_free(&decoder->pixels);
    scratch_free(&decoder->intermediate);
    scratch_free(&decoder->last_row);
    free(decoder);
}

enum crop_status crop_read_header(const uint8_t *data, size_t size, struct crop_header *header) {
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return CROP_UNSUPPORTED;
    memset(header, 0, sizeof *header);
    for (size_t at = 2; at + 4 <= size && data[at] == 0xFF;) {
        uint8_t marker = data[at + 1];
        if (marker == 0xFF) { /* fill byte */
            at++;
            continue;
        }
        int has_length = marker != 0x01 && !(marker >= 0xD0 && marker <= 0xD9);
        if (!has_length) return CROP_UNSUPPORTED;
        size_t length = (size_t)data[at + 2] << 8 | data[at + 3];
        if (length < 2 || length > size - at - 2) return CROP_DAMAGED;
        if (marker == 0xC0 || marker == 0xC1) {
            if (length < 8) return CROP_DAMAGED;
            header->height = data[at + 5] << 8 | data[at + 6];
            header->width = data[at + 7] << 8 | data[at + 8];
            if (data[at + 4] != 8 || (data[at + 9] != 1 && data[at + 9] != 3)) return CROP_UNSUPPORTED;
        } else if (marker == 0xE1) {
            header->has_app1 = 1;
        } else if (marker == 0xDA) {
            return header->width && header->height ? CROP_OK : CROP_UNSUPPORTED;
        }
        at += 2 + length;
    }
    return CROP_DAMAGED;
}

/* Whether there is an EOI marker; without one the file is truncated, perhaps below the crop. */
static int has_end_marker(const uint8_t *data, size_t size) {
    for (size_t at = size; at >= 2; at--)
        if (data[at - 2] == 0xFF && data[at - 1] == 0xD9) return 1;
    return 0;
}

/* Whether it is a single 8-bit scan, grayscale or 4:4:4, 4:2:2, 4:4:0 or 4:2:0, as nearly all JPEGs are. */
static int is_baseline(const struct jpeg_decompress_struct *jpeg) {
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->data_precision != 8) return 0;
    if (jpeg->comps_in_scan != jpeg->num_components) return 0;
    if (jpeg->jpeg_color_space == JCS_GRAYSCALE) return jpeg->num_components == 1;
    if (jpeg->num_components != 3) return 0;
    if (jpeg->jpeg_color_space != JCS_YCbCr && jpeg->jpeg_color_space != JCS_RGB) return 0;
    const jpeg_component_info *first = jpeg->comp_info;
    for (int i = 1; i < 3; i++)
        if (first[i].h_samp_factor != 1 || first[i].v_samp_factor != 1) return 0;
    return first->h_samp_factor <= 2 && first->v_samp_factor <= 2;
}

static int is_integral(const struct crop_box *box) {
    return box->left == rint(box->left) && box->top == rint(box->top) && box->width == rint(box->width) &&
           box->height == rint(box->height);
}

static int round_and_clamp(double value, int low, int high) {
    double rounded = rint(value);
    return rounded < low ? low : rounded > high ? high : (int)rounded;
}

/* Compute the resize weights for a box of the image, at the scale at which it is decoded. */
static enum crop_status plan_axes(crop_decoder *decoder, const struct crop_box *box, int flip, int antialias,
                                  int side) {
    struct resize_axis *x = &decoder->x, *y = &decoder->y;
    int width = (int)decoder->jpeg.output_width, height = (int)decoder->jpeg.output_height, ok;
    if (antialias && !is_integral(box)) {
        ok = resize_axis_triangle(x, side, box->left, fmin(box->width, width - box->left), width, flip) &&
             resize_axis_triangle(y, side, box->top, fmin(box->height, height - box->top), height, 0);
    } else {
        int left = round_and_clamp(box->left, 0, width - 1), top = round_and_clamp(box->top, 0, height - 1);
        int box_width = round_and_clamp(box->width, 1, width - left);
        int box_height = round_and_clamp(box->height, 1, height - top);
        int longest = box_width > box_height ? box_width : box_height;
        if (antialias && longest > MAX_BLUR_FACTOR * side) return CROP_UNSUPPORTED;
        ok = resize_axis_linear(x, side, left, box_width, antialias, flip) &&
             resize_axis_linear(y, side, top, box_height, antialias, 0);
    }
    if (!ok) return CROP_NO_MEMORY;
    return x->taps > MAX_TAPS || y->taps > MAX_TAPS ? CROP_UNSUPPORTED : CROP_OK;
}

/* Decoded pixels, from the first one that the resize reads. */
struct decoded_rows {
    uint8_t *pixels;
    size_t stride;
};

/* Reserve memory for the rows and one more, because vector code may read and write a little past the end of a row. */
static enum crop_status reserve_rows(crop_decoder *decoder, size_t columns, size_t rows, struct decoded_rows *decoded) {
    decoded->stride = columns * 3 + RESIZE_OVERREAD;
    if (decoded->stride > MAX_BUFFER_BYTES / (rows + 1)) return CROP_UNSUPPORTED;
    decoded->pixels = scratch_reserve(&decoder->pixels, decoded->stride * (rows + 1));
    return decoded->pixels ? CROP_OK : CROP_NO_MEMORY;
}

/* Decode the crop with the baseline decoder; CROP_UNSUPPORTED means: let libjpeg decode it. */
static enum crop_status decode_baseline(crop_decoder *decoder, size_t columns, size_t rows,
                                        struct decoded_rows *decoded) {
    const struct resize_axis *x = &decoder->x, *y = &decoder->y;
    struct baseline_region region = {x->low, y->low, x->high, y->high};
    enum crop_status status = reserve_rows(decoder, columns, rows, decoded);
    if (status != CROP_OK) return status;
    return baseline_decode(decoder->baseline, &decoder->jpeg, &region, decoded->pixels, decoded->stride);
}

/* Decode the crop with libjpeg. */
static enum crop_status decode_libjpeg(crop_decoder *decoder, size_t columns, size_t rows,
                                       struct decoded_rows *decoded) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    const struct resize_axis *x = &decoder->x, *y = &decoder->y;
    /* Upsampling reads the neighbors of subsampled chroma: decode those too, so that the edges of the crop are the same
       as in the whole image. Request whole blocks: otherwise libjpeg's SIMD code reads memory that it never wrote,
       which is harmless but makes valgrind complain. */
    int pad_x = jpeg->max_h_samp_factor > 1 ? 2 : 0, pad_y = jpeg->max_v_samp_factor > 1 ? 2 : 0;
    jpeg_start_decompress(jpeg);
    JDIMENSION block = (JDIMENSION)(jpeg->max_h_samp_factor * jpeg->SCALED_BLOCK_SIDE);
    JDIMENSION left = (JDIMENSION)(x->low > pad_x ? x->low - pad_x : 0);
    JDIMENSION end = ((JDIMENSION)(x->high + pad_x) + block - 1) / block * block;
    JDIMENSION width = (end < jpeg->output_width ? end : jpeg->output_width) - left;
    jpeg_crop_scanline(jpeg, &left, &width);

    size_t before = (size_t)(x->low - (int)left);
    enum crop_status status = reserve_rows(decoder, before + columns > width ? before + columns : width, rows, decoded);
    if (status != CROP_OK) return status;
    JDIMENSION top = (JDIMENSION)(y->low > pad_y ? y->low - pad_y : 0);
    if (top && jpeg_skip_scanlines(jpeg, top) != top) return CROP_DAMAGED;

    JSAMPROW pointers[ROWS_PER_READ];
    while ((int)jpeg->output_scanline < y->high) {
        int at = (int)jpeg->output_scanline, count = 0;
        for (; count < ROWS_PER_READ && at + count < y->high; count++) {
            /* Rows above the crop are read into the first row, which is then overwritten. */
            size_t row = at + count < y->low ? 0 : (size_t)(at + count - y->low);
            pointers[count] = decoded->pixels + row * decoded->stride;
        }
        if (!jpeg_read_scanlines(jpeg, pointers, (JDIMENSION)count)) return CROP_DAMAGED;
    }
    decoded->pixels += before * 3;
    return CROP_OK;
}

/* Decode the crop and resize it. libjpeg's errors leave this function by longjmp, so it must not own memory. */
static enum crop_status decode(crop_decoder *decoder, const uint8_t *data, size_t size,
                               const struct crop_box *requested, int flip, int antialias, int side, uint8_t *out) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    jpeg_mem_src(jpeg, data, (unsigned long)size);
    if (jpeg_read_header(jpeg, TRUE) != JPEG_HEADER_OK || !is_baseline(jpeg)) return CROP_UNSUPPORTED;
    /* Search behind the header only: a thumbnail in it has an EOI of its own. */
    if (!has_end_marker(jpeg->src->next_input_byte, jpeg->src->bytes_in_buffer)) return CROP_DAMAGED;
    struct crop_box box = *requested;
    double width = jpeg->image_width, height = jpeg->image_height;
    if (box.image_width != width || box.image_height != height) return CROP_UNSUPPORTED;
    if (width * height > MAX_PIXELS) return CROP_UNSUPPORTED;
    if (!(box.left >= 0 && box.top >= 0 && box.width > 0 && box.height > 0)) return CROP_UNSUPPORTED;
    if (!(box.left + box.width <= width + 1e-6 && box.top + box.height <= height + 1e-6)) return CROP_UNSUPPORTED;

    double shrink = fmin(box.width, box.height) / (side * RESIZE_HEADROOM);
    int eighths = shrink >= 2 ? (int)ceil(8 / shrink) : 8;
    box.left *= eighths / 8.0, box.top *= eighths / 8.0, box.width *= eighths / 8.0, box.height *= eighths / 8.0;
    jpeg->scale_num = (unsigned)eighths;
    jpeg->scale_denom = 8;
    jpeg->out_color_space = JCS_RGB;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_calc_output_dimensions(jpeg);
    enum crop_status status = plan_axes(decoder, &box, flip, antialias, side);
    if (status != CROP_OK) return status;
    struct resize_axis *x = &decoder->x, *y = &decoder->y;

    /* The resize reads at least `taps` columns and rows; those beyond the decoded pixels have a weight of zero. */
    size_t columns = (size_t)(x->high - x->low), rows = (size_t)(y->high - y->low);
    if (columns < (size_t)x->taps) columns = (size_t)x->taps;
    if (rows < (size_t)y->taps) rows = (size_t)y->taps;
    struct decoded_rows decoded;
    status = CROP_UNSUPPORTED;
    if (decoder->baseline && eighths == 8) status = decode_baseline(decoder, columns, rows, &decoded);
    if (status == CROP_UNSUPPORTED) status = decode_libjpeg(decoder, columns, rows, &decoded);
    if (status != CROP_OK) return status;
    size_t intermediate_bytes = columns * 3 * sizeof(int16_t) + 2 * RESIZE_OVERREAD;
    int16_t *intermediate = scratch_reserve(&decoder->intermediate, intermediate_bytes);
    uint8_t *last_row = scratch_reserve(&decoder->last_row, (size_t)side * 3 + RESIZE_OVERREAD);
    if (!intermediate || !last_row) return CROP_NO_MEMORY;
    resize_rgb(x, y, decoded.pixels, decoded.stride, (int)columns, side, intermediate, last_row, out, decoder->simd);
    return CROP_OK;
}

enum crop_status crop_decode(crop_decoder *decoder, const uint8_t *data, size_t size, const struct crop_box *box,
                             int flip, int antialias, int side, uint8_t *out) {
    enum crop_status status;
    if (side < 1) return CROP_UNSUPPORTED;
    if (setjmp(decoder->error_jump)) {
        status = decoder->error_status;
    } else {
        /* A new object for each image, which takes less than a microsecond: an image without tables must not inherit
           those of the image before. */
        jpeg_create_decompress(&decoder->jpeg);
        status = decode(decoder, data, size, box, flip, antialias, side, out);
    }
    jpeg_destroy_decompress(&decoder->jpeg);
    scratch_trim(&decoder->pixels);
    return status;
}
