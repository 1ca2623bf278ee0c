/*
 * ioctls.c - carries an ioctl to the server: the struct itself, what its pointer points to, and the
 * files behind the fd numbers in it. The kernel would copy these from user memory; which bytes
 * those are is the same knowledge.
 */
#include "../layouts.h"
#include "fakenv.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One ioctl after XFER has been unwrapped. */
struct request {
	uint32_t nr, arg_size, params_size;
	void *arg, *params;
	int fd_inside; /* -1: none */
	bool wants_nodes;
};

static void look_at_control(struct request *r)
{
	const struct nvos54_control *c = r->arg;

	r->params = (void *)(uintptr_t)c->params;
	r->params_size = r->params ? c->paramsSize : 0;
	if (c->cmd == NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD &&
	    r->params_size == sizeof(struct nv0000_export_object_to_fd))
		r->fd_inside = ((struct nv0000_export_object_to_fd *)r->params)->fd;
	if ((c->cmd == NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD ||
	     c->cmd == NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO ||
	     c->cmd == NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD ||
	     c->cmd == NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD) &&
	    r->params_size >= sizeof(int32_t))
		memcpy(&r->fd_inside, r->params, sizeof r->fd_inside);
}

static void look_at_alloc(struct request *r)
{
	const struct nvos21_alloc *a = r->arg; /* both forms begin alike */

	r->params = (void *)(uintptr_t)a->pAllocParms;
	r->params_size = r->params ? nv_class_params(a->hClass, fake_branch()) : 0;
	r->wants_nodes = a->hClass == NV01_DEVICE_0;
}

static void look_at_escape(struct request *r)
{
	if (r->nr == NV_ESC_RM_CONTROL && r->arg_size == sizeof(struct nvos54_control))
		look_at_control(r);
	else if (r->nr == NV_ESC_RM_ALLOC &&
	         (r->arg_size == sizeof(struct nvos21_alloc) || r->arg_size == sizeof(struct nvos64_alloc)))
		look_at_alloc(r);
	else if (r->nr == NV_ESC_REGISTER_FD && r->arg_size == sizeof(struct nv_ioctl_register_fd))
		r->fd_inside = ((struct nv_ioctl_register_fd *)r->arg)->ctl_fd;
}

static void look_at_uvm(struct request *r)
{
	switch (r->nr) {
	case UVM_REGISTER_CHANNEL:
		r->fd_inside = ((struct uvm_register_channel *)r->arg)->rmCtrlFd;
		break;
	case UVM_REGISTER_GPU:
		r->fd_inside = ((struct uvm_register_gpu *)r->arg)->rmCtrlFd;
		break;
	case UVM_REGISTER_GPU_VASPACE:
		r->fd_inside = ((struct uvm_register_gpu_vaspace *)r->arg)->rmCtrlFd;
		break;
	case UVM_MM_INITIALIZE:
		r->fd_inside = ((struct uvm_mm_initialize *)r->arg)->uvmFd;
		break;
	case UVM_MAP_EXTERNAL_ALLOCATION:
		r->fd_inside =
		        ((struct uvm_map_external_tail *)((char *)r->arg + uvm_map_tail_at(fake_branch())))
		                ->rmCtrlFd;
		break;
	default:
		break;
	}
}

/* 0, or the errno the kernel gives before the driver proper sees the call. */
static int unwrap(struct request *r, const struct node *node, unsigned long request)
{
	if (node->kind == EMU_UVM) {
		r->nr = (uint32_t)request;
		r->arg_size = uvm_arg_size(r->nr, fake_branch());
		look_at_uvm(r);
		return 0;
	}
	if (NV_IOC_TYPE(request) != NV_IOC_MAGIC)
		return ENOTTY;
	r->nr = NV_IOC_NR(request);
	r->arg_size = NV_IOC_SIZE(request);
	if (r->nr == NV_ESC_IOCTL_XFER_CMD) {
		struct nv_ioctl_xfer x;

		if (r->arg_size != sizeof x)
			return EINVAL;
		memcpy(&x, r->arg, sizeof x);
		if (x.size > NV_XFER_MAX)
			return EINVAL;
		*r = (struct request){x.cmd, x.size, 0, (void *)(uintptr_t)x.ptr, NULL, -1, false};
	}
	look_at_escape(r);
	return 0;
}

static int exchange(const struct node *node, struct request *r, void *room, size_t capacity)
{
	struct emu_call *call = room;
	struct emu_page_op op;
	struct emu_reply *reply;
	struct node inside;
	int memfd = -1, rc;
	char *body = (char *)room + sizeof *call;

	*call = (struct emu_call){.op = EMU_OP_IOCTL,
	                          .request = r->nr,
	                          .arg_size = r->arg_size,
	                          .params_size = r->params_size,
	                          .file = node->file,
	                          .other = EMU_NO_FILE};
	if (r->fd_inside >= 0 && fake_node_of_fd(r->fd_inside, &inside))
		call->other = inside.file;
	if (r->wants_nodes)
		call->nodes = fake_nodes_held();
	if (r->arg_size)
		memcpy(body, r->arg, r->arg_size);
	if (r->params_size)
		memcpy(body + r->arg_size, r->params, r->params_size);
	rc = fake_call(room, sizeof *call + r->arg_size + r->params_size, capacity, &reply, &memfd, &op);
	if (rc == 0 && reply->arg_size == r->arg_size && reply->params_size <= r->params_size) {
		memcpy(r->arg, reply + 1, r->arg_size);
		if (reply->params_size)
			memcpy(r->params, (char *)(reply + 1) + r->arg_size, reply->params_size);
		if (op.kind)
			fake_pages_apply(&op, memfd);
		emu_meter_add(reply->model_ns);
	}
	if (memfd >= 0)
		close(memfd);
	return -rc;
}

static enum emu_cost cost_of(const struct node *node, const struct request *r)
{
	if (node->kind != EMU_UVM)
		return r->nr == NV_ESC_RM_CONTROL && ((const struct nvos54_control *)r->arg)->cmd ==
		                                             NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS
		               ? EMU_COST_GATE
		               : EMU_COST_RM;
	switch (r->nr) {
	case UVM_MAP_EXTERNAL_SPARSE:
		return EMU_COST_SPARSE;
	case UVM_MAP_EXTERNAL_ALLOCATION:
		return EMU_COST_UVM_MAP;
	case UVM_UNMAP_EXTERNAL:
		return EMU_COST_UVM_UNMAP;
	default:
		return EMU_COST_RM;
	}
}

static int metered_exchange(const struct node *node, struct request *r, void *room, size_t capacity)
{
	int error;

	emu_meter_begin(cost_of(node, r));
	error = exchange(node, r, room, capacity);
	emu_meter_end();
	return error;
}

int fake_ioctl(const struct node *node, unsigned long request, void *arg)
{
	_Alignas(16) char
	        small[UVM_MAP_BYTES_MAX + 1024]; /* malloc may be locked by a thread that is parked */
	struct request r = {.arg = arg, .fd_inside = -1};
	size_t capacity;
	void *room = small;
	int error = unwrap(&r, node, request);

	if (!error && r.params_size > EMU_PARAMS_MAX)
		error = EINVAL;
	if (!error) {
		capacity = sizeof(struct emu_call) + sizeof(struct emu_page_op) + r.arg_size + r.params_size;
		if (capacity > sizeof small)
			room = malloc(capacity);
		error = room ? metered_exchange(node, &r, room, capacity) : ENOMEM;
		if (room != small)
			free(room);
	}
	if (!error && node->kind == EMU_UVM && r.nr == UVM_INITIALIZE)
		fake_pages_serve(node->file);
	if (!error)
		return 0;
	errno = error;
	return -1;
}
