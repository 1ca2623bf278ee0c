/*
 * trampoline.S - the hot path of every hooked call on x86-64. No prototype: arguments stay where they are, so a call
 * may have any number of them and may grow new ones.
 *
 *   count in this thread's own slot      a plain add; the order "count, then gate" (region.h) is kept by valved's
 *   read the gate word                   membarrier. Measured on a Xeon: 0.7 ns a launch, against 8.3 with lock inc
 *   jump to the real call
 *
 * Where valved or the kernel knows no membarrier, threads have no plain slot but a fenced one, and valve_slow counts
 * with the lock prefix, which is a full fence.
 *
 * r10 and r11 are free at a call boundary (System V ABI); r10 names the entry for the slow path. The slow path is
 * taken by a thread's first call (no slot yet), while the gate is open, and by a name's first call (`real` is
 * valve_slow until then).
 */
#include "hooks.h"
#define GATE_EPOCH     64 /* offset of valve_control.gate_epoch */
#define ENTRY_BYTES    32
#define ENTRY_TARGET   24
#define TLS_FENCED     8
#define TRAMPOLINE     64 /* bytes of one pool trampoline */

	.macro entry label, name, real
	.pushsection .data.rel.valve_entries, "aw", @progbits
	.balign 8
\label:
	.quad \real, \name, 0, 0
	.popsection
	.endm

	.macro name_string name
	.pushsection .rodata.valve_names, "a", @progbits
.Lname_\name:
	.asciz "\name"
	.popsection
	.endm

	.macro submit_body entry
	leaq \entry(%rip), %r10
	movq valve_tls@gottpoff(%rip), %r11
	movq %fs:(%r11), %r11
	testq %r11, %r11
	jz valve_slow
	incq (%r11)
	testl $1, valve_pages+GATE_EPOCH(%rip)
	jnz valve_slow
	jmp *(%r10)
	.endm

	.macro export name
	.globl \name
	.type \name, @function
	.balign 16
\name:
	.endm

	.macro submit name
	name_string \name
	entry .Lentry_\name, .Lname_\name, valve_slow
	export \name
	.cfi_startproc
	submit_body .Lentry_\name
	.cfi_endproc
	.size \name, . - \name
	.endm

	.macro observe_body entry
	leaq \entry(%rip), %r10
	jmp valve_observe_call
	.endm

	.macro observe name
	name_string \name
	entry .Lentry_\name, .Lname_\name, 0
	export \name
	.cfi_startproc
	observe_body .Lentry_\name
	.cfi_endproc
	.size \name, . - \name
	.endm

	.section .text.valve_trampolines, "ax", @progbits
	.globl valve_trampolines_begin, valve_trampolines_end
	.hidden valve_trampolines_begin, valve_trampolines_end
	.balign 64
valve_trampolines_begin:

#define EMIT_SUBMIT(name, ptds)  submit name;
#define EMIT_OBSERVE(name, ptds) observe name;
#define SUBMIT_BASE(twin, base)  VALVE_TWIN_##twin(EMIT_SUBMIT, base)
#define OBSERVE_BASE(twin, base) VALVE_TWIN_##twin(EMIT_OBSERVE, base)
VALVE_SUBMIT_BASES(SUBMIT_BASE)
VALVE_OBSERVE_BASES(OBSERVE_BASE)

/* The pools behind cuGetProcAddress: trampoline i belongs to entry i. */
	.globl valve_pool_submit, valve_pool_observe, valve_pool_entries
	.hidden valve_pool_submit, valve_pool_observe, valve_pool_entries
	.pushsection .data.rel.valve_pool, "aw", @progbits
	.balign 64
valve_pool_entries:
	.zero ENTRY_BYTES * (VALVE_POOL_SUBMIT + VALVE_POOL_OBSERVE)
	.popsection

	.balign TRAMPOLINE
valve_pool_submit:
	.set index, 0
	.rept VALVE_POOL_SUBMIT
	.balign TRAMPOLINE
	.cfi_startproc
	submit_body valve_pool_entries+ENTRY_BYTES*index
	.cfi_endproc
	.set index, index + 1
	.endr
	.balign TRAMPOLINE
valve_pool_observe:
	.rept VALVE_POOL_OBSERVE
	.balign TRAMPOLINE
	.cfi_startproc
	observe_body valve_pool_entries+ENTRY_BYTES*index
	.cfi_endproc
	.set index, index + 1
	.endr
	.balign TRAMPOLINE

/* A fenced count, when there is such a slot and nothing else to do. */
	.globl valve_slow
	.hidden valve_slow
	.type valve_slow, @function
valve_slow:
	.cfi_startproc
	movq valve_tls@gottpoff(%rip), %r11
	cmpq $0, %fs:(%r11)
	jnz valve_slower
	movq %fs:TLS_FENCED(%r11), %r11
	testq %r11, %r11
	jz valve_slower
	lock incq (%r11)
	testl $1, valve_pages+GATE_EPOCH(%rip)
	jnz valve_slower
	movq (%r10), %r11
	cmpq $0, ENTRY_TARGET(%r10)
	je valve_slower
	jmp *%r11
	.cfi_endproc
	.size valve_slow, . - valve_slow

/* Out of line: keeps every argument register, asks valve_launch_slow(entry) where to go, and goes there. */
	.type valve_slower, @function
valve_slower:
	.cfi_startproc
	pushq %rdi
	pushq %rsi
	pushq %rdx
	pushq %rcx
	pushq %r8
	pushq %r9
	pushq %r10
	subq $128, %rsp
	.cfi_adjust_cfa_offset 56 + 128
	movups %xmm0, (%rsp)
	movups %xmm1, 16(%rsp)
	movups %xmm2, 32(%rsp)
	movups %xmm3, 48(%rsp)
	movups %xmm4, 64(%rsp)
	movups %xmm5, 80(%rsp)
	movups %xmm6, 96(%rsp)
	movups %xmm7, 112(%rsp)
	movq %r10, %rdi
	call valve_launch_slow
	movq %rax, %r11
	movups (%rsp), %xmm0
	movups 16(%rsp), %xmm1
	movups 32(%rsp), %xmm2
	movups 48(%rsp), %xmm3
	movups 64(%rsp), %xmm4
	movups 80(%rsp), %xmm5
	movups 96(%rsp), %xmm6
	movups 112(%rsp), %xmm7
	addq $128, %rsp
	popq %r10
	popq %r9
	popq %r8
	popq %rcx
	popq %rdx
	popq %rsi
	popq %rdi
	.cfi_adjust_cfa_offset -(56 + 128)
	jmp *%r11
	.cfi_endproc
	.size valve_slower, . - valve_slower

/* Where no whole-context event exists, calls on per-thread default streams leave a mark: those cannot be queried. */
	.globl valve_ptds_detour
	.hidden valve_ptds_detour
	.type valve_ptds_detour, @function
valve_ptds_detour:
	.cfi_startproc
	movl $1, valve_shim(%rip) /* .ptds, the first member */
	jmp *ENTRY_TARGET(%r10)
	.cfi_endproc
	.size valve_ptds_detour, . - valve_ptds_detour

/* A call that may begin a capture, of a driver newer than we are: from now on nothing is probed. */
	.globl valve_capture_detour
	.hidden valve_capture_detour
	.type valve_capture_detour, @function
valve_capture_detour:
	.cfi_startproc
	movl $1, valve_shim+4(%rip) /* .unknown_capture, the second member */
	jmp *ENTRY_TARGET(%r10)
	.cfi_endproc
	.size valve_capture_detour, . - valve_capture_detour

/* An observer needs the result, so it calls: handler(a0..a5, entry), the entry as seventh argument on the stack. */
	.type valve_observe_call, @function
valve_observe_call:
	.cfi_startproc
	pushq %r10
	.cfi_adjust_cfa_offset 8
	call valve_observe
	addq $8, %rsp
	.cfi_adjust_cfa_offset -8
	ret
	.cfi_endproc
	.size valve_observe_call, . - valve_observe_call

	.globl valve_trampolines_end
valve_trampolines_end:

/*
 * dlopen: glibc finds the caller's RUNPATH by the return address, so whatever is not ours is jumped to, never called.
 * valve_dlopen returns {handle or NULL, flags}.
 */
	.globl dlopen
	.type dlopen, @function
dlopen:
	.cfi_startproc
	pushq %rdi
	pushq %rsi
	subq $8, %rsp
	.cfi_adjust_cfa_offset 24
	call valve_dlopen
	addq $8, %rsp
	popq %rsi
	popq %rdi
	.cfi_adjust_cfa_offset -24
	testq %rax, %rax
	jnz 1f
	movl %edx, %esi
	movq valve_real_dlopen(%rip), %r11
	testq %r11, %r11
	jz 1f
	jmp *%r11
1:	ret
	.cfi_endproc
	.size dlopen, . - dlopen

	.section .note.GNU-stack, "", @progbits
