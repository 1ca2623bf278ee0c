/*
 * ioctls.c - which escape is allowed on which node, with which size, and which file answers it
 * (U/escape.c, O/nvidia/nv.c). A wrong size or node is -1/EINVAL from ioctl(); everything else is a
 * status inside the struct.
 */
#include "server.h"
#include <errno.h>
#include <string.h>

static int card_info(struct call *c)
{
	struct nv_ioctl_card_info *cards = (struct nv_ioctl_card_info *)c->arg;
	uint32_t room = c->head.arg_size / (uint32_t)sizeof *cards, i;

	if (c->head.arg_size % sizeof *cards || room < S.gpus)
		return EINVAL;
	memset(cards, 0, c->head.arg_size);
	for (i = 0; i < S.gpus; i++) {
		const struct emu_gpu *b = S.gpu[i].board;

		cards[i] = (struct nv_ioctl_card_info){.valid = 1,
		                                       .domain = b->gpu_id >> 16,
		                                       .bus = (uint8_t)(b->gpu_id >> 8),
		                                       .slot = (uint8_t)b->gpu_id,
		                                       .vendor_id = 0x10de,
		                                       .device_id = 0x2330,
		                                       .gpu_id = b->gpu_id,
		                                       .fb_size = b->total_bytes,
		                                       .minor_number = b->minor};
	}
	return 0;
}

/* reply: 1 = the versions agree. cmd '2' only asks (kernel-open/common/inc/nv-ioctl.h). */
static int check_version(struct call *c)
{
	struct nv_ioctl_rm_api_version *v = (struct nv_ioctl_rm_api_version *)c->arg;

	if (c->head.arg_size != sizeof *v)
		return EINVAL;
	v->versionString[sizeof v->versionString - 1] = 0;
	LOCKED(&S.state);
	v->reply = v->cmd == '2' || strcmp(v->versionString, S.driver) == 0;
	memset(v->versionString, 0, sizeof v->versionString);
	memcpy(v->versionString, S.driver, sizeof S.driver);
	return v->reply ? 0 : EINVAL;
}

static int register_fd(struct call *c)
{
	int error = EINVAL;

	if (c->head.arg_size != sizeof(struct nv_ioctl_register_fd))
		return EINVAL;
	LOCKED(&S.state);
	if (c->other && c->other->kind == EMU_CTL && c->other != c->file && !c->file->ctl) {
		c->other->refs++;
		c->file->ctl = c->other;
		error = 0;
	}
	return error;
}

static int allocate(struct call *c)
{
	struct nvos21_alloc *small = (struct nvos21_alloc *)c->arg;
	struct nvos64_alloc a = {0};

	if (c->head.arg_size == sizeof a) {
		memcpy(&a, c->arg, sizeof a);
		a.status = rm_alloc(c, &a);
		memcpy(c->arg, &a, sizeof a);
	} else if (c->head.arg_size == sizeof *small) {
		a = (struct nvos64_alloc){.hRoot = small->hRoot,
		                          .hObjectParent = small->hObjectParent,
		                          .hObjectNew = small->hObjectNew,
		                          .hClass = small->hClass,
		                          .pAllocParms = small->pAllocParms};
		small->status = rm_alloc(c, &a);
		small->hObjectNew = a.hObjectNew;
		small->hClass = a.hClass;
	} else
		return EINVAL;
	return 0;
}

/* A case per escape: its struct, and the function that fills in the status. */
#define ANSWER(type, function)                          \
	{                                               \
		struct type *p = (struct type *)c->arg; \
		if (c->head.arg_size != sizeof *p)      \
			return EINVAL;                  \
		p->status = function(c, p);             \
		return 0;                               \
	}

static int control_file_only(struct call *c)
{
	switch (c->head.request) {
	case NV_ESC_RM_ALLOC:
		return allocate(c);
	case NV_ESC_RM_FREE:
		ANSWER(nvos00_free, rm_free)
	case NV_ESC_RM_CONTROL:
		ANSWER(nvos54_control, rm_control)
	case NV_ESC_RM_DUP_OBJECT:
		ANSWER(nvos55_dup, rm_dup)
	case NV_ESC_RM_SHARE:
		ANSWER(nvos57_share, rm_share)
	default:
		tally_unknown(TALLY_ESCAPE, c->head.request);
		return EINVAL;
	}
}

int driver_ioctl(struct call *c)
{
	if (c->file->kind == EMU_UVM)
		return uvm_ioctl(c);
	if (c->file->kind == EMU_NODE && load(&S.gpu[c->file->minor].board->lost))
		return EINVAL;
	switch (c->head.request) {
	case NV_ESC_CARD_INFO:
		return card_info(c);
	case NV_ESC_CHECK_VERSION_STR:
		return check_version(c);
	case NV_ESC_REGISTER_FD:
		return register_fd(c);
	case NV_ESC_SYS_PARAMS: /* memory block size, only meaningful on POWER */
	case NV_ESC_ATTACH_GPUS_TO_FD:
	case NV_ESC_STATUS_CODE:
	case NV_ESC_ALLOC_OS_EVENT:
	case NV_ESC_FREE_OS_EVENT:
		return 0;
	case NV_ESC_WAIT_OPEN_COMPLETE:
		return load(&S.board->driver[0]) > 535 ? 0 : EINVAL;
	default:
		return c->file->kind == EMU_CTL ? control_file_only(c) : EINVAL;
	}
}
