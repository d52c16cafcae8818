#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "crop.h"
#include "resize.h"

#define API 2 /* incremented with every change of the functions that stoker calls */

typedef struct {
    PyObject_HEAD
    crop_decoder *decoder;
    int busy;
} Decoder;

static void release_views(Py_buffer *views, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) PyBuffer_Release(&views[i]);
    PyMem_Free(views);
}

/* Acquire the buffers of a list of images; that of None is empty and has no owner. */
static Py_buffer *acquire_views(PyObject *list, const char *caller, Py_ssize_t *count) {
    if (!PyList_Check(list)) {
        PyErr_Format(PyExc_TypeError, "%s() takes a list of images", caller);
        return NULL;
    }
    PyObject *images = PyList_AsTuple(list); /* acquiring a buffer may run any code, which may change the list */
    if (!images) return NULL;
    *count = PyTuple_Size(images);
    Py_buffer *views = PyMem_Calloc((size_t)*count + 1, sizeof *views);
    if (!views) PyErr_NoMemory();
    for (Py_ssize_t i = 0; views && i < *count; i++) {
        PyObject *image = PyTuple_GetItem(images, i);
        if (image == Py_None || PyObject_GetBuffer(image, &views[i], PyBUF_SIMPLE) == 0) continue;
        release_views(views, i);
        views = NULL;
    }
    Py_DECREF(images);
    return views;
}

/* Return (width, height, has_app1), or None. */
static PyObject *header_tuple(enum crop_status status, const struct crop_header *header) {
    if (status != CROP_OK) return Py_NewRef(Py_None);
    return Py_BuildValue("iiN", header->width, header->height, PyBool_FromLong(header->has_app1));
}

static PyObject *read_headers(PyObject *module, PyObject *list) {
    (void)module;
    Py_ssize_t count;
    Py_buffer *views = acquire_views(list, "read_headers", &count);
    if (!views) return NULL;
    struct {
        enum crop_status status;
        struct crop_header header;
    } *results = PyMem_Calloc((size_t)count + 1, sizeof *results);
    PyObject *result = results ? PyList_New(count) : PyErr_NoMemory();
    if (result) {
        Py_BEGIN_ALLOW_THREADS /* the bytes may have to be read from disk */
        for (Py_ssize_t i = 0; i < count; i++)
            results[i].status = crop_read_header(views[i].buf, (size_t)views[i].len, &results[i].header);
        Py_END_ALLOW_THREADS
    }
    for (Py_ssize_t i = 0; result && i < count; i++) {
        PyObject *header = header_tuple(results[i].status, &results[i].header);
        if (!header || PyList_SetItem(result, i, header) < 0) Py_CLEAR(result);
    }
    PyMem_Free(results);
    release_views(views, count);
    return result;
}

static PyObject *decoder_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"simd", NULL};
    int simd = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|p", names, &simd)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Decoder *self = (Decoder *)allocate(type, 0);
    if (self && !(self->decoder = crop_new(simd))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void decoder_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    crop_free(((Decoder *)object)->decoder);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* Acquire a buffer of exactly `bytes` bytes; return -1 with an exception set if it has another size. */
static int exact_buffer(PyObject *object, Py_buffer *view, int flags, Py_ssize_t bytes, const char *name) {
    if (PyObject_GetBuffer(object, view, flags) < 0) return -1;
    if (view->len == bytes) return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected %zd", name, view->len, bytes);
    PyBuffer_Release(view);
    return -1;
}

static PyObject *fill_views(crop_decoder *decoder, const Py_buffer *views, Py_ssize_t count, const Py_buffer *boxes,
                            const Py_buffer *flips, const Py_buffer *out, int side, int antialias) {
    PyObject *result = PyBytes_FromStringAndSize(NULL, count);
    if (!result) return NULL;
    char *statuses = PyBytes_AsString(result);
    size_t row = (size_t)side * (size_t)side * 3;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        struct crop_box box;
        memcpy(&box, (const struct crop_box *)boxes->buf + i, sizeof box); /* may be unaligned */
        statuses[i] = CROP_UNSUPPORTED;
        if (!views[i].obj) continue;
        int flip = ((const char *)flips->buf)[i];
        uint8_t *pixels = (uint8_t *)out->buf + (size_t)i * row;
        size_t size = (size_t)views[i].len;
        statuses[i] = (char)crop_decode(decoder, views[i].buf, size, &box, flip, antialias, side, pixels);
    }
    Py_END_ALLOW_THREADS
    return result;
}

static PyObject *decoder_fill(PyObject *object, PyObject *args) {
    Decoder *self = (Decoder *)object;
    PyObject *list, *box_object, *flip_object, *out_object, *result = NULL;
    int side, antialias;
    if (!PyArg_ParseTuple(args, "OOOOip", &list, &box_object, &flip_object, &out_object, &side, &antialias))
        return NULL;
    if (side < 1 || side > 1 << 14)
        return PyErr_Format(PyExc_ValueError, "side must be between 1 and 16384, got %d", side);
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "decoder is in use by another thread");
    self->busy = 1; /* until the end, because acquiring buffers may run other threads */
    Py_ssize_t count, row = (Py_ssize_t)side * side * 3;
    Py_buffer boxes, flips, out, *views = acquire_views(list, "fill", &count);
    if (!views) goto done;
    if (count > PY_SSIZE_T_MAX / row) {
        PyErr_NoMemory();
        goto without_boxes;
    }
    if (exact_buffer(box_object, &boxes, PyBUF_SIMPLE, count * (Py_ssize_t)sizeof(struct crop_box), "boxes") < 0)
        goto without_boxes;
    if (exact_buffer(flip_object, &flips, PyBUF_SIMPLE, count, "flips") < 0) goto without_flips;
    if (exact_buffer(out_object, &out, PyBUF_WRITABLE, count * row, "out") < 0) goto without_out;
    result = fill_views(self->decoder, views, count, &boxes, &flips, &out, side, antialias);
    PyBuffer_Release(&out);
without_out:
    PyBuffer_Release(&flips);
without_flips:
    PyBuffer_Release(&boxes);
without_boxes:
    release_views(views, count);
done:
    self->busy = 0;
    return result;
}

static PyMethodDef decoder_methods[] = {
    {"fill", decoder_fill, METH_VARARGS,
     "fill(images, boxes, flips, out, side, antialias)\n\n"
     "Decode each image that is not None into its row of `out`; return one status byte per image, 0 for success.\n"
     "`boxes` holds six float64 per image: left, top, width, height, and the width and height of the image;\n"
     "`flips` holds one byte per image. Their element types are not checked."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot decoder_slots[] = {
    {Py_tp_doc, "Decoder for crops of JPEGs, to be used by one thread at a time."},
    {Py_tp_new, decoder_new},
    {Py_tp_dealloc, decoder_dealloc},
    {Py_tp_methods, decoder_methods},
    {0, NULL},
};

static PyType_Spec decoder_spec = {"stoker_native.Decoder", sizeof(Decoder), 0, Py_TPFLAGS_DEFAULT, decoder_slots};

static PyMethodDef functions[] = {
    {"read_headers", read_headers, METH_O,
     "read_headers(images)\n\nReturn (width, height, has_app1) of each JPEG that fill() may support, None for others."},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&decoder_spec);
    int added = type ? PyModule_AddObjectRef(module, "Decoder", type) : -1;
    Py_XDECREF(type);
    if (added < 0 || PyModule_AddIntConstant(module, "API", API) < 0) return -1;
    return PyModule_AddIntConstant(module, "SIMD", resize_has_simd() != 0);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "stoker_native",
    .m_doc = "Decode and resize crops of JPEGs.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit_stoker_native(void) { return PyModuleDef_Init(&definition); }
