#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "crop.h"
#include "resize.h"

#define API 1 /* raised with every change of what stoker calls */

typedef struct {
    PyObject_HEAD
    crop_decoder *decoder;
    int busy;
} Decoder;

static void release_views(Py_buffer *views, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) PyBuffer_Release(&views[i]);
    PyMem_Free(views);
}

/* The bytes of a list's images, those of None empty and with no owner. */
static Py_buffer *views_of(PyObject *list, const char *caller, Py_ssize_t *count) {
    if (!PyList_Check(list)) {
        PyErr_Format(PyExc_TypeError, "%s() wants a list of images", caller);
        return NULL;
    }
    PyObject *images = PyList_AsTuple(list); /* looking at one's buffer may run anything, and the list change */
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

/* What was found, or None. */
static PyObject *told(enum crop_status status, const struct crop_look *found) {
    if (status != CROP_OK) return Py_NewRef(Py_None);
    return Py_BuildValue("iiN", found->width, found->height, PyBool_FromLong(found->may_be_turned));
}

static PyObject *look(PyObject *module, PyObject *list) {
    (void)module;
    Py_ssize_t count;
    Py_buffer *views = views_of(list, "look", &count);
    if (!views) return NULL;
    struct {
        enum crop_status status;
        struct crop_look found;
    } *looks = PyMem_Calloc((size_t)count + 1, sizeof *looks);
    PyObject *answer = looks ? PyList_New(count) : PyErr_NoMemory();
    if (answer) {
        Py_BEGIN_ALLOW_THREADS /* the bytes may have to come from a disk */
        for (Py_ssize_t i = 0; i < count; i++)
            looks[i].status = crop_look(views[i].buf, (size_t)views[i].len, &looks[i].found);
        Py_END_ALLOW_THREADS
    }
    for (Py_ssize_t i = 0; answer && i < count; i++) {
        PyObject *one = told(looks[i].status, &looks[i].found);
        if (!one || PyList_SetItem(answer, i, one) < 0) Py_CLEAR(answer);
    }
    PyMem_Free(looks);
    release_views(views, count);
    return answer;
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

/* A buffer of exactly so many bytes, or -1 with an exception. */
static int exact_buffer(PyObject *object, Py_buffer *view, int flags, Py_ssize_t bytes, const char *name) {
    if (PyObject_GetBuffer(object, view, flags) < 0) return -1;
    if (view->len == bytes) return 0;
    PyErr_Format(PyExc_ValueError, "%s is %zd bytes, and should be %zd", name, view->len, bytes);
    PyBuffer_Release(view);
    return -1;
}

static PyObject *fill_views(crop_decoder *decoder, const Py_buffer *views, Py_ssize_t count, const Py_buffer *boxes,
                            const Py_buffer *flips, const Py_buffer *out, int side, int antialias) {
    PyObject *answer = PyBytes_FromStringAndSize(NULL, count);
    if (!answer) return NULL;
    char *statuses = PyBytes_AsString(answer);
    size_t row = (size_t)side * (size_t)side * 3;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        struct crop_box box;
        memcpy(&box, (const struct crop_box *)boxes->buf + i, sizeof box); /* it may lie anywhere */
        statuses[i] = CROP_UNSUPPORTED;
        if (views[i].obj)
            statuses[i] = (char)crop_fill(decoder, views[i].buf, (size_t)views[i].len, &box, ((const char *)flips->buf)[i],
                                          antialias, side, (uint8_t *)out->buf + (size_t)i * row);
    }
    Py_END_ALLOW_THREADS
    return answer;
}

static PyObject *decoder_fill(PyObject *object, PyObject *args) {
    Decoder *self = (Decoder *)object;
    PyObject *list, *box_object, *flip_object, *out_object, *answer = NULL;
    int side, antialias;
    if (!PyArg_ParseTuple(args, "OOOOip", &list, &box_object, &flip_object, &out_object, &side, &antialias)) return NULL;
    if (side < 1 || side > 1 << 14) return PyErr_Format(PyExc_ValueError, "a side of %d pixels is not from 1 to 16384", side);
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "a decoder serves one thread at a time");
    self->busy = 1; /* until the end, because looking at buffers may run other threads */
    Py_ssize_t count, row = (Py_ssize_t)side * side * 3;
    Py_buffer boxes, flips, out, *views = views_of(list, "fill", &count);
    if (!views) goto done;
    if (count > PY_SSIZE_T_MAX / row) {
        PyErr_NoMemory();
        goto without_boxes;
    }
    if (exact_buffer(box_object, &boxes, PyBUF_SIMPLE, count * (Py_ssize_t)sizeof(struct crop_box), "boxes") < 0)
        goto without_boxes;
    if (exact_buffer(flip_object, &flips, PyBUF_SIMPLE, count, "flips") < 0) goto without_flips;
    if (exact_buffer(out_object, &out, PyBUF_WRITABLE, count * row, "out") < 0) goto without_out;
    answer = fill_views(self->decoder, views, count, &boxes, &flips, &out, side, antialias);
    PyBuffer_Release(&out);
without_out:
    PyBuffer_Release(&flips);
without_flips:
    PyBuffer_Release(&boxes);
without_boxes:
    release_views(views, count);
done:
    self->busy = 0;
    return answer;
}

static PyMethodDef decoder_methods[] = {
    {"fill", decoder_fill, METH_VARARGS,
     "fill(images, boxes, flips, out, side, antialias)\n\nFill a row of `out` from each image that is not None; a byte each "
     "tells how it went, 0 if well.\n`boxes` are six float64 each: left, top, width, height, and the "
     "size of the image. Neither they nor `flips`, a byte each, are checked for their type."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot decoder_slots[] = {
    {Py_tp_doc, "Decodes crops of JPEGs, for one thread at a time."},
    {Py_tp_new, decoder_new},
    {Py_tp_dealloc, decoder_dealloc},
    {Py_tp_methods, decoder_methods},
    {0, NULL},
};

static PyType_Spec decoder_spec = {"stoker_native.Decoder", sizeof(Decoder), 0, Py_TPFLAGS_DEFAULT, decoder_slots};

static PyMethodDef functions[] = {
    {"look", look, METH_O,
     "look(images)\n\nTell width, height and whether there may be EXIF of each JPEG that fill() knows, None of others."},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&decoder_spec);
    int added = type ? PyModule_AddObjectRef(module, "Decoder", type) : -1;
    Py_XDECREF(type);
    if (added < 0 || PyModule_AddIntConstant(module, "API", API) < 0) return -1;
    return PyModule_AddIntConstant(module, "SIMD", resize_has_simd() != 0);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "stoker_native", "Crops of JPEGs, decoded alone.", 0, functions, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_stoker_native(void) { return PyModuleDef_Init(&definition); }
