//! What the host is and allows, and what all its clients share.
//!
//! What it can do ([`features`], read from the kernel's types by [`btf`]), what this process may ([`privileges`]), its [`cgroup`]s and
//! [`process`]es; how programs are loaded ([`loader`]); where clients are pinned ([`pins`]), and the [`maps`] beside them; the thread that
//! keeps a program on network [`interfaces`] ([`xdp`]): the [`receiver`] of reports or an agent's [`responder`].

pub mod btf;

pub mod cgroup;

pub mod features;

pub mod interfaces;

pub mod loader;

pub mod maps;

pub mod pins;

pub mod privileges;

pub mod process;

pub mod receiver;

pub mod responder;

pub mod xdp;
