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

#define GAP 2.0 /* libjpeg itself shrinks what would be shrunk further by this factor or more, as in decode.py */
#define MAX_PIXELS 178956970.0
#define MAX_BUFFER ((size_t)64 << 20) /* what needs more is left to the general decoder */
#define MAX_TAPS 512 /* beyond, weights of 14 bits are too coarse */
#define MOST_BLURRED 8 /* what shrinks further, decode.py does otherwise */
#define ROWS_AT_ONCE 8

/* Pixels that a block gives across, once shrunk. */
#if JPEG_LIB_VERSION >= 70
#define BLOCK_SIDE min_DCT_h_scaled_size
#else
#define BLOCK_SIDE min_DCT_scaled_size
#endif

struct crop_decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf failed;
    enum crop_status why;
    int simd;
    baseline_decoder *baseline; /* NULL where libjpeg decodes all */
    struct resize_axis x, y;
    struct resize_memory pixels, middle, line; /* kept from image to image: none of ours is allocated for each */
};

/* libjpeg ends here on an error: back to where decoding began. */
static void on_error(j_common_ptr jpeg) {
    crop_decoder *decoder = jpeg->client_data;
    decoder->why = jpeg->err->msg_code == JERR_OUT_OF_MEMORY ? CROP_NO_MEMORY : CROP_DAMAGED;
    longjmp(decoder->failed, 1);
}

/* A warning means that bytes were lost or made up: the general decoder shall decide. */
static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0) on_error(jpeg);
}

static void no_output(j_common_ptr jpeg) { (void)jpeg; }

crop_decoder *crop_new(int simd) {
    crop_decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder) return NULL;
    decoder->simd = simd && resize_has_simd();
    if (decoder->simd && baseline_runs_here() && !(decoder->baseline = baseline_new())) {
        free(decoder);
        return NULL;
    }
    decoder->jpeg.err = jpeg_std_error(&decoder->errors);
    decoder->errors.error_exit = on_error;
    decoder->errors.emit_message = on_message;
    decoder->errors.output_message = no_output;
    decoder->jpeg.client_data = decoder;
    return decoder;
}

void crop_free(crop_decoder *decoder) {
    if (!decoder) return;
    baseline_free(decoder->baseline);
    resize_axis_free(&decoder->x);
    resize_axis_free(&decoder->y);
    resize_free(&decoder->pixels);
    resize_free(&decoder->middle);
    resize_free(&decoder->line);
    free(decoder);
}

enum crop_status crop_look(const uint8_t *data, size_t size, struct crop_look *found) {
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return CROP_UNSUPPORTED;
    memset(found, 0, sizeof *found);
    for (size_t at = 2; at + 4 <= size && data[at] == 0xFF;) {
        uint8_t marker = data[at + 1];
        if (marker == 0xFF) { /* a fill byte */
            at++;
            continue;
        }
        if (marker == 0x01 || (marker >= 0xD0 && marker <= 0xD9)) return CROP_UNSUPPORTED; /* these have no length */
        size_t length = (size_t)data[at + 2] << 8 | data[at + 3];
        if (length < 2 || length > size - at - 2) return CROP_DAMAGED;
        if (marker == 0xC0 || marker == 0xC1) {
            if (length < 8) return CROP_DAMAGED;
            found->height = data[at + 5] << 8 | data[at + 6];
            found->width = data[at + 7] << 8 | data[at + 8];
            if (data[at + 4] != 8 || (data[at + 9] != 1 && data[at + 9] != 3)) return CROP_UNSUPPORTED;
        } else if (marker == 0xE1) {
            found->may_be_turned = 1;
        } else if (marker == 0xDA) {
            return found->width && found->height ? CROP_OK : CROP_UNSUPPORTED;
        }
        at += 2 + length;
    }
    return CROP_DAMAGED;
}

/* Whether the picture has an end; one without was cut short, maybe below all that is decoded. */
static int has_end(const uint8_t *data, size_t size) {
    for (size_t at = size; at >= 2; at--)
        if (data[at - 2] == 0xFF && data[at - 1] == 0xD9) return 1;
    return 0;
}

/* One scan of 8 bits, grey or colours in full or at half the width or height: what nearly all JPEGs are. */
static int is_plain(const struct jpeg_decompress_struct *jpeg) {
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

static int is_whole(const struct crop_box *box) {
    return box->left == rint(box->left) && box->top == rint(box->top) && box->width == rint(box->width) &&
           box->height == rint(box->height);
}

static int clip(double value, int low, int high) {
    double rounded = rint(value);
    return rounded < low ? low : rounded > high ? high : (int)rounded;
}

/* Decide which pixels of the (shrunk) image make which of the output. */
static enum crop_status plan_axes(crop_decoder *decoder, const struct crop_box *box, int flip, int antialias, int side) {
    struct resize_axis *x = &decoder->x, *y = &decoder->y;
    int width = (int)decoder->jpeg.output_width, height = (int)decoder->jpeg.output_height, planned;
    if (antialias && !is_whole(box)) {
        planned = resize_axis_triangle(x, side, box->left, fmin(box->width, width - box->left), width, flip) &&
                  resize_axis_triangle(y, side, box->top, fmin(box->height, height - box->top), height, 0);
    } else {
        int left = clip(box->left, 0, width - 1), top = clip(box->top, 0, height - 1);
        int wide = clip(box->width, 1, width - left), high = clip(box->height, 1, height - top);
        if (antialias && (wide > MOST_BLURRED * side || high > MOST_BLURRED * side)) return CROP_UNSUPPORTED;
        planned = resize_axis_linear(x, side, left, wide, antialias, flip) &&
                  resize_axis_linear(y, side, top, high, antialias, 0);
    }
    if (!planned) return CROP_NO_MEMORY;
    return x->taps > MAX_TAPS || y->taps > MAX_TAPS ? CROP_UNSUPPORTED : CROP_OK;
}

/* Pixels that were decoded, from the first that is sampled on. */
struct decoded {
    uint8_t *pixels;
    size_t stride;
};

/* Room for rows of pixels and for one more, because what fills or reads a row may go on a little behind it. */
static enum crop_status make_room(crop_decoder *decoder, size_t columns, size_t rows, struct decoded *found) {
    found->stride = columns * 3 + RESIZE_OVERREAD;
    if (found->stride > MAX_BUFFER / (rows + 1)) return CROP_UNSUPPORTED;
    found->pixels = resize_room(&decoder->pixels, found->stride * (rows + 1));
    return found->pixels ? CROP_OK : CROP_NO_MEMORY;
}

/* Decode the planned part ourselves; CROP_UNSUPPORTED leaves it to libjpeg. */
static enum crop_status decode_baseline(crop_decoder *decoder, size_t columns, size_t rows, struct decoded *found) {
    const struct resize_axis *x = &decoder->x, *y = &decoder->y;
    struct baseline_part part = {x->low, y->low, x->high, y->high};
    enum crop_status status = make_room(decoder, columns, rows, found);
    if (status != CROP_OK) return status;
    return baseline_decode(decoder->baseline, &decoder->jpeg, &part, found->pixels, found->stride);
}

/* Let libjpeg decode the planned part. */
static enum crop_status decode_libjpeg(crop_decoder *decoder, size_t columns, size_t rows, struct decoded *found) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    const struct resize_axis *x = &decoder->x, *y = &decoder->y;
    /* Colours at half the resolution are spread to their neighbours: those are decoded too, so that the crop's edges
       are as they are in the whole image. Blocks are asked for whole: libjpeg's SIMD would go on into what it never
       wrote, without harm, but valgrind would tell. */
    int beside = jpeg->max_h_samp_factor > 1 ? 2 : 0, above = jpeg->max_v_samp_factor > 1 ? 2 : 0;
    jpeg_start_decompress(jpeg);
    JDIMENSION block = (JDIMENSION)(jpeg->max_h_samp_factor * jpeg->BLOCK_SIDE);
    JDIMENSION left = (JDIMENSION)(x->low > beside ? x->low - beside : 0);
    JDIMENSION end = ((JDIMENSION)(x->high + beside) + block - 1) / block * block;
    JDIMENSION wide = (end < jpeg->output_width ? end : jpeg->output_width) - left;
    jpeg_crop_scanline(jpeg, &left, &wide);

    size_t before = (size_t)(x->low - (int)left);
    enum crop_status status = make_room(decoder, before + columns > wide ? before + columns : wide, rows, found);
    if (status != CROP_OK) return status;
    JDIMENSION top = (JDIMENSION)(y->low > above ? y->low - above : 0);
    if (top && jpeg_skip_scanlines(jpeg, top) != top) return CROP_DAMAGED;

    JSAMPROW pointers[ROWS_AT_ONCE];
    while ((int)jpeg->output_scanline < y->high) {
        int at = (int)jpeg->output_scanline, count = 0;
        for (; count < ROWS_AT_ONCE && at + count < y->high; count++) /* those above the crop into its first row */
            pointers[count] = found->pixels + (at + count < y->low ? 0 : (size_t)(at + count - y->low)) * found->stride;
        if (!jpeg_read_scanlines(jpeg, pointers, (JDIMENSION)count)) return CROP_DAMAGED;
    }
    found->pixels += before * 3;
    return CROP_OK;
}

/* Decode the planned part and resize it. libjpeg's errors leave this function by longjmp: it owns nothing. */
static enum crop_status decode(crop_decoder *decoder, const uint8_t *data, size_t size, const struct crop_box *wanted,
                               int flip, int antialias, int side, uint8_t *out) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    jpeg_mem_src(jpeg, data, (unsigned long)size);
    if (jpeg_read_header(jpeg, TRUE) != JPEG_HEADER_OK || !is_plain(jpeg)) return CROP_UNSUPPORTED;
    /* Only behind the header: a thumbnail in it has an end of its own. */
    if (!has_end(jpeg->src->next_input_byte, jpeg->src->bytes_in_buffer)) return CROP_DAMAGED;
    struct crop_box box = *wanted;
    double width = jpeg->image_width, height = jpeg->image_height;
    if (box.image_width != width || box.image_height != height) return CROP_UNSUPPORTED;
    if (width * height > MAX_PIXELS) return CROP_UNSUPPORTED;
    if (!(box.left >= 0 && box.top >= 0 && box.width > 0 && box.height > 0)) return CROP_UNSUPPORTED;
    if (!(box.left + box.width <= width + 1e-6 && box.top + box.height <= height + 1e-6)) return CROP_UNSUPPORTED;

    double shrink = fmin(box.width, box.height) / (side * GAP);
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

    /* Columns and rows that are sampled; what no pixel was decoded for is read with a weight of nothing. */
    size_t columns = (size_t)(x->high - x->low), rows = (size_t)(y->high - y->low);
    if (columns < (size_t)x->taps) columns = (size_t)x->taps;
    if (rows < (size_t)y->taps) rows = (size_t)y->taps;
    struct decoded found;
    status = CROP_UNSUPPORTED;
    if (decoder->baseline && eighths == 8) status = decode_baseline(decoder, columns, rows, &found);
    if (status == CROP_UNSUPPORTED) status = decode_libjpeg(decoder, columns, rows, &found);
    if (status != CROP_OK) return status;
    int16_t *middle = resize_room(&decoder->middle, columns * 3 * sizeof *middle + 2 * RESIZE_OVERREAD);
    uint8_t *line = resize_room(&decoder->line, (size_t)side * 3 + RESIZE_OVERREAD);
    if (!middle || !line) return CROP_NO_MEMORY;
    resize_rgb(x, y, found.pixels, found.stride, (int)columns, side, middle, line, out, decoder->simd);
    return CROP_OK;
}

enum crop_status crop_fill(crop_decoder *decoder, const uint8_t *data, size_t size, const struct crop_box *box,
                           int flip, int antialias, int side, uint8_t *out) {
    enum crop_status status;
    if (side < 1) return CROP_UNSUPPORTED;
    if (setjmp(decoder->failed)) {
        status = decoder->why;
    } else {
        /* Anew for each image, in less than a microsecond: one that brings no tables must not get another's. */
        jpeg_create_decompress(&decoder->jpeg);
        status = decode(decoder, data, size, box, flip, antialias, side, out);
    }
    jpeg_destroy_decompress(&decoder->jpeg);
    resize_trim(&decoder->pixels);
    return status;
}
