//! The host: its kernel's features, this process's permissions, and everything that all clients
//! share.
//!
//! The modules are: the kernel's [`features`], which need the kernel's types from [`btf`]; the
//! permissions of this process ([`privileges`]); the host's [`cgroup`]s and [`process`]es; the
//! [`loader`] of programs; the [`pins`] of clients and the [`maps`] beside them; and the thread
//! that attaches a program to network [`interfaces`], also to interfaces that appear later
//! ([`xdp`]). The attached program is either the [`receiver`] of reports or an agent's
//! [`responder`].

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
